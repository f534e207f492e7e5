"""A teacher that the trainer's processes share scores as one that each has whole."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.parallel_cases import make_student
from tests.distributed.teacher_cases import LAYOUTS, OBJECTIVES, TEACHERS, score_everything
from tests.helpers.worlds import run_world
from titan_opd.models import save_decoder

EVERYWHERE = [(size, layout) for size, layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teachers")
    for teacher in TEACHERS:
        save_decoder(make_student(teacher, num_attention_heads=4, num_key_value_heads=4), folder / teacher)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    return score_everything(folder, None)


@pytest.fixture(scope="module")
def worlds(folder, tmp_path_factory):
    return {
        size: run_world(score_everything, folder, layouts, size=size, folder=tmp_path_factory.mktemp(f"of-{size}"))
        for size, layouts in LAYOUTS.items()
    }


def shares(size, layout):
    """Of each process: the slice of the answers that is its, and its place on the axis tp."""
    tp = LAYOUTS[size][layout].tp
    return [(slice(rank // tp, None, size // tp), rank % tp) for rank in range(size)]


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize(("size", "layout"), EVERYWHERE)
def test_it_scores_as_a_whole_one(alone, worlds, size, layout, teacher, objective):
    expected = alone["whole", teacher, objective]
    for (share, tp_rank), found in zip(shares(size, layout), worlds[size], strict=True):
        own = found[layout, teacher, objective]
        assert len(own) == len(expected[share]) > 0
        for scores, wanted in zip(own, expected[share], strict=True):
            assert scores.keys() == wanted.keys()
            for name, value in scores.items():
                whole = wanted[name]
                if name == "lm_head_weight":
                    whole = whole.chunk(LAYOUTS[size][layout].tp)[tp_rank]
                if name == "ids":
                    assert torch.equal(value, whole)
                else:
                    torch.testing.assert_close(value, whole, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "layout"), EVERYWHERE)
def test_each_process_holds_its_share_of_the_matrices_alone(worlds, size, layout):
    copies = LAYOUTS[size][layout].dp_replicate
    for teacher in TEACHERS:
        held = [found[layout, teacher, "held"] for found in worlds[size]]
        assert sum(held) == pytest.approx(copies)
        assert max(held) < 1.4 * copies / size  # rows that the processes do not divide

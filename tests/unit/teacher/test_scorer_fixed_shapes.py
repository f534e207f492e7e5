"""With `fixed_shapes` a trajectory's scores are the same to the bit, however trajectories are grouped in calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.tiny_models import make_tiny_checkpoint
from tests.helpers.trajectories import make_trajectories
from titan_opd.config import Objective
from titan_opd.models import load_decoder
from titan_opd.teacher import NativeScorer, TeacherModel

OBJECTIVES = {
    "teacher_topk": (Objective(kind="forward_kl", support="teacher_topk"), {}),
    "samples of the teacher": (Objective(kind="mc_forward_kl", support="sampled"), {}),
    "samples of the student": (Objective(kind="policy_gradient", support="sampled"), {"num_samples": 3}),
    "student_topk": (Objective(kind="reverse_kl", support="student_topk"), {"top_k": 6}),
    "dense": (Objective(kind="reverse_kl", support="dense"), {}),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return load_decoder(make_tiny_checkpoint(tmp_path_factory.mktemp("teacher"), "qwen3"))


def make_scorer(decoder, objective, *, fixed_shapes):
    return NativeScorer(
        TeacherModel(decoder),
        objective,
        vocab_size=101,
        top_k=7,
        tokens_per_forward=60,
        logits_chunk_mb=5 * 101 * 4 / 2**20,  # five rows
        num_samples=2,
        fixed_shapes=fixed_shapes,
    )


def equal_bits(one, other) -> bool:
    assert one.trajectory is other.trajectory
    names = ("ids", "logprobs", "tail_logprobs", "hidden", "labels")
    pairs = [(getattr(one.scores, name), getattr(other.scores, name)) for name in names]
    assert all((left is None) == (right is None) for left, right in pairs)
    return all(left is None or torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=10, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=9, max_size=9),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 10),
)
def test_grouping_and_order_do_not_matter(decoder, name, sizes, order, seed):
    objective, recorded = OBJECTIVES[name]
    trajectories = make_trajectories(9, vocab_size=101, seed=seed, **recorded)
    scorer = make_scorer(decoder, objective, fixed_shapes=True)
    together = {id(one.trajectory): one for one in scorer.score(trajectories)}
    order.shuffle(trajectories)
    while trajectories:
        size = sizes.pop()
        for one in scorer.score(trajectories[:size]):
            assert equal_bits(one, together[id(one.trajectory)])
        trajectories = trajectories[size:]


def test_packing_shows_in_the_bits_otherwise(decoder):
    objective, _ = OBJECTIVES["dense"]
    trajectories = make_trajectories(9, vocab_size=101)
    packed = make_scorer(decoder, objective, fixed_shapes=False).score(trajectories)
    alone = make_scorer(decoder, objective, fixed_shapes=True).score(trajectories)
    assert not all(equal_bits(one, other) for one, other in zip(packed, alone, strict=True))
    for one, other in zip(packed, alone, strict=True):
        torch.testing.assert_close(one.scores.hidden, other.scores.hidden, atol=1e-4, rtol=1e-4)

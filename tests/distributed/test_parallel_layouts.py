"""However the processes share the student, it trains as in one process: losses, gradients, weights."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.parallel_cases import LAYOUTS, NUM_STEPS, OBJECTIVES, STUDENTS, train_layouts
from tests.helpers.worlds import run_world

pytestmark = pytest.mark.slow  # six more processes import everything

CASES = [(size, layout) for size, layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(scope="module")
def alone():
    return train_layouts()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    return {size: run_world(train_layouts, size=size, folder=tmp_path_factory.mktemp(f"of-{size}")) for size in LAYOUTS}


def assert_close(left, right):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def comparable(metrics):
    """Without a quotient of means, which depends on how a batch is cut."""
    return {name: value for name, value in metrics.items() if name != "effective_sample_share"}


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("student", STUDENTS)
@pytest.mark.parametrize(("size", "layout"), CASES)
def test_training_is_that_of_one_process(alone, worlds, size, layout, student, kind):
    expected = alone["alone", student, kind]
    assert len(expected["steps"]) == NUM_STEPS
    for result in (rank[layout, student, kind] for rank in worlds[size]):
        assert_close(result["gradients"], expected["gradients"])
        assert_close(result["weights"], expected["weights"])
        for metrics, expected_metrics in zip(result["steps"], expected["steps"], strict=True):
            assert comparable(metrics) == pytest.approx(comparable(expected_metrics), abs=1e-5)


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("student", STUDENTS)
def test_every_weight_is_trained(alone, student, kind):
    for name, gradient in alone["alone", student, kind]["gradients"].items():
        # A key's bias adds the same to all scores of a query, and softmax does not see it.
        assert name.endswith("k_proj.bias") or gradient.abs().max() > 1e-5, name

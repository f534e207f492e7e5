"""Two processes train and evaluate as one does."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.cases import INDIVISIBLE, NUM_STEPS, OBJECTIVES, STUDENTS, run_cases
from tests.helpers.arithmetic import save_model
from tests.helpers.worlds import run_world

pytestmark = pytest.mark.slow  # two more processes import everything


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The cases in one process, and in each of two."""
    folder = tmp_path_factory.mktemp("world")
    toml = folder / "run.toml"
    save_model(folder / "student", "llama", seed=0)
    toml.write_text(TOML.format(folder=folder))
    lone = run_cases(toml)
    return lone, run_world(run_cases, toml, size=2, folder=folder)


TOML = """
[student]
path = "{folder}/student"
[teacher]
engine = "none"
[objective]
kind = "cross_entropy"
[rollout]
engine = "answers"
[training]
steps = 1
[data]
task = "arithmetic"
[evaluation.sampling]
max_new_tokens = 20
"""


def assert_close(left, right):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def comparable(metrics):
    """Without a quotient of means, which depends on how a batch is cut."""
    return {name: value for name, value in metrics.items() if name != "effective_sample_share"}


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("student", STUDENTS)
def test_gradients_steps_and_weights_are_those_of_one_process(results, student, kind):
    lone, world = (result[student, kind] for result in (results[0], results[1][0]))
    first, second = world["micro-batches"]
    assert first < second, "the processes should have different numbers of micro-batches"
    assert_close(lone["gradients"], world["gradients"])
    assert_close(lone["weights"], world["weights"])
    assert len(world["steps"]) == NUM_STEPS
    for expected, metrics in zip(lone["steps"], world["steps"], strict=True):
        assert comparable(metrics) == pytest.approx(comparable(expected), rel=1e-5, abs=1e-5)


def test_all_processes_know_the_same(results):
    first, second = results[1]
    for key, value in first.items():
        if isinstance(key, tuple):
            assert value["steps"] == second[key]["steps"]
            assert all(torch.equal(value["weights"][name], second[key]["weights"][name]) for name in value["weights"])
        else:
            assert value == second[key]


def test_evaluation_is_that_of_one_process(results):
    (metrics, texts), (expected_metrics, expected_texts) = results[1][0]["evaluation"], results[0]["evaluation"]
    assert texts == expected_texts
    assert len(set(texts)) > 3
    assert metrics == pytest.approx(expected_metrics, abs=1e-5)
    assert metrics["teacher_kl"] > 0.1


@pytest.mark.parametrize("case", range(len(INDIVISIBLE)))
def test_what_the_processes_cannot_share_is_refused(results, case):
    status, message = results[1][0]["refusals"][case]
    assert status == 2
    assert message.count("\n") == 1
    assert "2 processes" in message
    assert "schedule.batch" in message or "evaluation.num_prompts" in message

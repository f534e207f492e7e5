"""Checkpoints that are written in the background: the same to the bit, one at a time, and failures that are told."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.helpers.arithmetic import VOCAB_SIZE, make_decoder
from tests.helpers.runs import assert_equal, model_bytes, optimizer_state
from tests.helpers.trajectories import make_trajectories
from tests.unit.checkpoint.learners import STATE, Failing, make_learner, make_saver, train
from titan_opd.checkpoint import checkpoint_steps, folder, load_samples
from titan_opd.errors import StorageError
from titan_opd.parallel import open_world
from titan_opd.teacher import LabelScorer


@pytest.fixture
def world():
    with open_world() as world:
        yield world


@pytest.fixture
def learner(world):
    learner = make_learner(make_decoder("qwen3", seed=0), world)
    train(learner, range(2))
    return learner


@pytest.fixture
def gate(monkeypatch):
    """Writing begins when it is set."""
    gate, start_folder = threading.Event(), folder.start_folder

    def wait_and_start(final):
        assert gate.wait(60)
        return start_folder(final)

    monkeypatch.setattr(folder, "start_folder", wait_and_start)
    yield gate
    gate.set()


@torch.no_grad()
def spoil(learner):
    """Change everything that a checkpoint holds."""
    for parameter in learner.model.parameters():
        parameter.add_(1)
        for moment in learner.optimizer.state[parameter].values():
            moment.add_(1)
    for group in learner.optimizer.param_groups:
        group["lr"] = group["lr"] + 1


def test_what_changes_after_the_call_is_not_in_the_checkpoint(tmp_path, learner, world, gate):
    scored = LabelScorer().score(make_trajectories(3, vocab_size=VOCAB_SIZE))
    gate.set()
    make_saver(tmp_path / "waited", learner, world).save(3, STATE, scored)
    gate.clear()
    background = make_saver(tmp_path / "background", learner, world, asynchronous=True)
    state, samples = {**STATE, "prompts": dict(STATE["prompts"])}, list(scored)
    background.save(3, state, samples)
    spoil(learner)
    state["prompts"]["next_number"] = 0
    gate.set()
    background.wait()
    ((_, left),) = checkpoint_steps(tmp_path / "waited").items()
    ((_, right),) = checkpoint_steps(tmp_path / "background").items()
    assert model_bytes(right) == model_bytes(left)
    assert_equal(optimizer_state(right, tmp_path), optimizer_state(left, tmp_path))
    assert (right / "trainer/state.json").read_text() == (left / "trainer/state.json").read_text()
    assert len(load_samples(right)) == len(load_samples(left)) == len(scored)
    assert {file.name for file in right.rglob("*")} == {file.name for file in left.rglob("*")}


def test_one_save_at_a_time_and_the_newest_are_kept(tmp_path, learner, world, gate):
    background = make_saver(tmp_path, learner, world, asynchronous=True, keep=1)
    background.save(3, STATE, [])
    assert background.is_writing
    assert background.poll() == {}
    assert checkpoint_steps(tmp_path) == {}
    threading.Timer(0.2, gate.set).start()
    background.save(6, STATE, [])  # waits for the one before it
    assert checkpoint_steps(tmp_path)  # of step 3, or already of step 6
    background.wait()
    assert not background.is_writing
    assert list(checkpoint_steps(tmp_path)) == [6]
    metrics = background.poll()
    assert list(metrics) == ["seconds/checkpoint_write"]
    assert metrics["seconds/checkpoint_write"] > 0
    assert background.poll() == {}


FINDERS = {
    "the next step": lambda background: poll_until_it_ends(background),
    "the next save": lambda background: background.save(9, STATE, []),
    "the end": lambda background: background.wait(),
}


def poll_until_it_ends(background):
    while background.is_writing:
        background.poll()


@pytest.mark.parametrize("finder", FINDERS)
def test_a_failed_write_is_told(tmp_path, learner, world, finder):
    make_saver(tmp_path, learner, world).save(3, STATE, [])
    full = Failing(OSError(28, "No space left on device"))
    background = make_saver(tmp_path, learner, world, full, asynchronous=True)
    background.save(6, STATE, [])
    with pytest.raises(StorageError) as failure:
        FINDERS[finder](background)
    step_3, step_6 = (tmp_path / "checkpoints" / f"step-{step:06d}" for step in (3, 6))
    assert str(failure.value) == (
        f"{step_6} could not be written (OSError: [Errno 28] No space left on device); {step_3} is intact. Make room, "
        "then go on with --resume"
    )
    assert list((tmp_path / "checkpoints").iterdir()) == [step_3]
    background.close()  # has nothing to add


def test_a_run_that_fails_leaves_the_checkpoint_that_was_being_written(tmp_path, learner, world, gate):
    background = make_saver(tmp_path, learner, world, asynchronous=True)
    background.save(3, STATE, [])
    threading.Timer(0.2, gate.set).start()
    background.close()
    assert list(checkpoint_steps(tmp_path)) == [3]
    make_saver(tmp_path, learner, world, Failing(OSError(28, "full")), asynchronous=True).close()

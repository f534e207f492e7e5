"""What a checkpoint puts back, and how a save fails."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from tests.helpers.arithmetic import make_decoder
from tests.unit.checkpoint.learners import STATE, Failing, make_learner, make_saver, train
from titan_opd.checkpoint import checkpoint_steps, load_trainer
from titan_opd.errors import StorageError
from titan_opd.models import load_decoder
from titan_opd.parallel import open_world
from titan_opd.weights import named_weights


@pytest.fixture
def world():
    with open_world() as world:
        yield world


def save(run, learner, world, tokenizer=None, keep=2, step=3):
    make_saver(run, learner, world, tokenizer, keep=keep).save(step, STATE, [])


def weights(learner):
    return {name: tensor.clone() for name, tensor in named_weights(learner.model.decoder)}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path, world, family):
    learner = make_learner(make_decoder(family, seed=0), world)
    train(learner, range(3))
    save(tmp_path, learner, world)
    at_the_cut = weights(learner)
    train(learner, range(3, 6))

    (checkpoint,) = checkpoint_steps(tmp_path).values()
    resumed = make_learner(load_decoder(checkpoint), world)
    assert load_trainer(checkpoint, model=resumed.model, optimizer=resumed.optimizer) == STATE
    resumed.steps_taken = STATE["optimizer_steps"]
    assert_equal(weights(resumed), at_the_cut)
    train(resumed, range(3, 6))
    assert_equal(weights(resumed), weights(learner))


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_trainer_state_of_another_model_is_refused(tmp_path, world):
    save(tmp_path, make_learner(make_decoder("llama", seed=0), world), world)
    (checkpoint,) = checkpoint_steps(tmp_path).values()
    other = make_learner(make_decoder("llama", seed=0, hidden_size=48, head_dim=8), world)
    with pytest.raises(ValueError, match=r"cannot resume from .*: its trainer state is missing or damaged"):
        load_trainer(checkpoint, model=other.model, optimizer=other.optimizer)


def test_a_failed_save_names_what_failed_and_what_is_intact(tmp_path, world):
    learner = make_learner(make_decoder("llama", seed=0), world)
    save(tmp_path, learner, world, step=3)
    with pytest.raises(StorageError) as failure:
        save(tmp_path, learner, world, step=6, tokenizer=Failing(OSError(28, "No space left on device")))
    step_3, step_6 = (tmp_path / "checkpoints" / f"step-{step:06d}" for step in (3, 6))
    assert str(failure.value) == (
        f"{step_6} could not be written (OSError: [Errno 28] No space left on device); {step_3} is intact. Make room, "
        "then go on with --resume"
    )
    assert list((tmp_path / "checkpoints").iterdir()) == [step_3]
    save(tmp_path, learner, world, step=6, keep=1)
    assert list((tmp_path / "checkpoints").iterdir()) == [step_6]


def interrupt_in_torch(*_, **__):
    """What torch makes of an interrupt that arrives while it saves."""
    raise CheckpointException("write", {1: (KeyboardInterrupt(), None)})


def test_an_interrupted_save_leaves_nothing_and_is_no_failure_of_storage(tmp_path, world, monkeypatch):
    learner = make_learner(make_decoder("llama", seed=0), world)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, learner, world, tokenizer=Failing(KeyboardInterrupt()))
    assert not list((tmp_path / "checkpoints").iterdir())
    monkeypatch.setattr("torch.distributed.checkpoint.save", interrupt_in_torch)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, learner, world)
    assert not list((tmp_path / "checkpoints").iterdir())

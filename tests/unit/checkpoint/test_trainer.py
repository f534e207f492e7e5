"""What a checkpoint puts back, and how a save fails."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from tests.helpers.arithmetic import VOCAB_SIZE, make_decoder
from tests.helpers.trajectories import make_trajectories
from titan_opd.checkpoint import checkpoint_steps, load_trainer, save_checkpoint
from titan_opd.config import Objective
from titan_opd.config.schema import OptimizerConfig, TrainingConfig
from titan_opd.data import load_tokenizer, pack
from titan_opd.errors import StorageError
from titan_opd.learner import DistillationModel, Learner
from titan_opd.models import load_decoder
from titan_opd.parallel import open_world, parallelize
from titan_opd.teacher import LabelScorer
from titan_opd.weights import named_weights

STATE = {"optimizer_steps": 3, "prompts": {"next_number": 24}}


@pytest.fixture
def world():
    with open_world() as world:
        yield world


def make_learner(decoder, world):
    model = DistillationModel(decoder, vocab_size=VOCAB_SIZE, logits_chunk_mb=1)
    parallelize(model, decoder, world.mesh, TrainingConfig(steps=1))
    config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, warmup_steps=2)
    return Learner(model, Objective(kind="cross_entropy"), config, num_steps=8, seed=0, world=world)


def train(learner, steps):
    for step in steps:
        trajectories = make_trajectories(4, vocab_size=VOCAB_SIZE, seed=step)
        learner.step(pack(LabelScorer().score(trajectories), 64), current_version=0)


def save(run, learner, world, tokenizer=None, keep=2, step=3):
    save_checkpoint(
        run,
        step,
        student=learner.model.decoder,
        tokenizer=tokenizer or load_tokenizer("arithmetic"),
        model=learner.model,
        optimizer=learner.optimizer,
        state=STATE,
        samples=[],
        keep=keep,
        world=world,
    )


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


class Failing:
    """A tokenizer that cannot be saved."""

    def __init__(self, error):
        self.error = error

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("half")
        raise self.error


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

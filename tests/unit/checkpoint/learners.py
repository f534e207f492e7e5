"""Tiny learners to save, and how they are saved."""

from __future__ import annotations

from tests.helpers.arithmetic import VOCAB_SIZE
from tests.helpers.trajectories import make_trajectories
from titan_opd.checkpoint import CheckpointSaver
from titan_opd.config import Objective
from titan_opd.config.schema import CheckpointConfig, OptimizerConfig, TrainingConfig
from titan_opd.data import load_tokenizer, pack
from titan_opd.learner import DistillationModel, Learner
from titan_opd.parallel import parallelize
from titan_opd.teacher import LabelScorer

STATE = {"optimizer_steps": 3, "prompts": {"next_number": 24}}


def make_learner(decoder, world):
    model = DistillationModel(decoder, vocab_size=VOCAB_SIZE, logits_chunk_mb=1)
    parallelize(model, decoder, world.mesh, TrainingConfig(steps=1))
    config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, warmup_steps=2)
    return Learner(model, Objective(kind="cross_entropy"), config, num_steps=8, seed=0, world=world)


def train(learner, steps):
    for step in steps:
        trajectories = make_trajectories(4, vocab_size=VOCAB_SIZE, seed=step)
        learner.step(pack(LabelScorer().score(trajectories), 64), current_version=0)


def make_saver(run, learner, world, tokenizer=None, **settings):
    return CheckpointSaver(
        run,
        CheckpointConfig(**settings),
        student=learner.model.decoder,
        tokenizer=tokenizer or load_tokenizer("arithmetic"),
        model=learner.model,
        optimizer=learner.optimizer,
        world=world,
        timeout_seconds=60,
    )


class Failing:
    """A tokenizer that cannot be saved."""

    def __init__(self, error):
        self.error = error

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("half")
        raise self.error

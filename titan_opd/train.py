"""The training job, told top to bottom. Everything below it is a room that it opens.

A run is this loop, once per policy version: the student writes answers, the teacher scores every token, the student
learns from the scores, and its new weights go in place into the engine that writes the next answers.
"""

from __future__ import annotations

import sys

from titan_opd.assemble import assemble
from titan_opd.config import Config
from titan_opd.data import pack
from titan_opd.learner import Learner
from titan_opd.observe import PhaseClock
from titan_opd.parallel import open_world
from titan_opd.run import Run, RunSummary
from titan_opd.schedule import SyncSchedule
from titan_opd.weights import named_weights


def train(config: Config) -> RunSummary:
    """Run a whole configuration and return what a person wants to know of it.

    Raises:
        ValueError: for whatever the user can mend: settings, files, tokenizers, a run folder in use.
    """
    clock = PhaseClock()
    with open_world() as world, Run.create(config, world, clock) as run:
        parts = assemble(config, world)
        run.announce(parts.describe())
        learner = Learner(
            parts.model,
            config.objective,
            config.optimizer,
            num_steps=config.training.steps * config.schedule.minibatches,
            world=world,
        )
        schedule = SyncSchedule(
            parts.prompts,
            parts.engine,
            parts.scorer,
            recording=parts.recording,
            schedule=config.schedule,
            rollout=config.rollout,
            clock=clock,
            world=world,
        )
        run.evaluate(0, parts.evaluator)
        for step in range(1, config.training.steps + 1):
            version = parts.engine.policy_version
            scored = schedule.next_batch()
            # Contiguous parts, so that a sample's minibatch does not depend on the number of processes.
            size = len(scored) // config.schedule.minibatches
            for first in range(0, len(scored), size):
                with clock.phase("pack"):
                    batches = pack(scored[first : first + size], config.training.tokens_per_microbatch)
                with clock.phase("train"):
                    metrics = learner.step(batches, current_version=version)
                clock.count_tokens("train", sum(len(batch.input_ids) for batch in batches))
            with clock.phase("weights"):
                parts.engine.load_weights(named_weights(parts.student), version + 1)

            run.record(step, metrics)
            if run.is_due(step, config.evaluation.every):
                run.evaluate(step, parts.evaluator)
            if run.is_due(step, config.checkpoint.every):
                run.save(step, parts.student, parts.tokenizer)
        return run.summary


if __name__ == "__main__":  # torchrun --nproc-per-node N -m titan_opd.train CONFIG
    from titan_opd.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))

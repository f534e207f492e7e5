"""The training job, told top to bottom. Everything below it is a room that it opens.

A run is this loop, once per policy version: the student writes answers, the teacher scores every token, the student
learns from the scores, and its new weights go in place into the engine that writes the next answers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from titan_opd.assemble import assemble
from titan_opd.config import Config
from titan_opd.data import pack
from titan_opd.learner import Learner, summarize_steps
from titan_opd.observe import PhaseClock
from titan_opd.observe.flight_recorder import set_up_flight_recorder
from titan_opd.parallel import open_world
from titan_opd.run import Run, RunSummary, pin_teacher


def train(config: Config, *, resume: bool = False, replay: Path | None = None) -> RunSummary:
    """Run a whole configuration and return what a person wants to know of it.

    Args:
        config: what to do.
        resume: go on with the run in `run.directory` from its newest checkpoint; the result equals that of a run that
            was never interrupted.
        replay: a journal with payload: train again on exactly the batches that it records.

    Raises:
        ValueError: for whatever the user can mend: settings, files, tokenizers, a run folder in use.
        StorageError: a checkpoint or a log could not be written; the checkpoints before it are intact.
    """
    config = pin_teacher(config)
    clock = PhaseClock()
    set_up_flight_recorder(config.run.directory)
    with open_world(config.parallel) as world, Run.open(config, world, clock, resume=resume) as run:
        parts = assemble(config, world, checkpoint=run.checkpoint)
        learner = Learner(
            parts.model,
            config.objective,
            config.optimizer,
            num_steps=config.training.steps * config.schedule.minibatches,
            seed=config.run.seed,
            world=world,
            parallel=config.parallel,
            sampling=config.rollout.sampling,
        )
        run.begin(parts, learner)
        with run.open_schedule(parts, replay) as schedule:
            if run.step == 0:
                run.evaluate(parts.evaluator)

            while run.step < config.training.steps:
                run.begin_step()
                version = run.step
                scored = schedule.next_batch(version)
                # Minibatches are contiguous, so that a sample's does not depend on the number of processes.
                size = len(scored) // config.schedule.minibatches
                with clock.phase("pack"):
                    minibatches = [
                        pack(scored[first : first + size], config.training.tokens_per_microbatch)
                        for first in range(0, len(scored), size)
                    ]
                with clock.phase("train"):
                    minibatches = [learner.with_proximal_policy(batches) for batches in minibatches]
                    metrics = [learner.step(batches, current_version=version) for batches in minibatches]
                clock.count_tokens("train", sum(len(batch.input_ids) for batches in minibatches for batch in batches))
                with clock.phase("weights"):
                    published = schedule.publish(version + 1)

                run.record(scored, {**summarize_steps(metrics), **published})
                if run.is_due(config.evaluation.every):
                    run.evaluate(parts.evaluator)
                if run.is_due(config.checkpoint.every):
                    run.save(parts, learner, schedule)
        return run.summary


if __name__ == "__main__":  # torchrun --nproc-per-node N -m titan_opd.train CONFIG
    from titan_opd.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))

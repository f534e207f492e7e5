"""The training job, told top to bottom. Everything below it is a room that it opens.

A run is this loop, once per policy version: the student writes answers, the teacher scores every token, the student
learns from the scores, and its new weights go in place into the engine that writes the next answers.
"""

from __future__ import annotations

from titan_opd.assemble import assemble
from titan_opd.config import Config
from titan_opd.data import pack
from titan_opd.learner import Learner
from titan_opd.observe import Display, MetricsWriter, PhaseClock, PhaseTimes
from titan_opd.run import RunFolder, RunSummary
from titan_opd.schedule import SyncSchedule
from titan_opd.weights import named_weights


def train(config: Config) -> RunSummary:
    """Run a whole configuration and return what a person wants to know of it.

    Raises:
        ValueError: for whatever the user can mend: settings, files, tokenizers, a run folder in use.
    """
    folder = RunFolder.create(config)
    parts = assemble(config)
    learner = Learner(
        parts.student,
        config.objective,
        config.optimizer,
        num_steps=config.training.steps * config.schedule.minibatches,
        vocab_size=parts.vocab_size,
        logits_chunk_mb=config.training.logits_chunk_mb,
    )
    clock, total = PhaseClock(), PhaseTimes()
    schedule = SyncSchedule(
        parts.prompts,
        parts.engine,
        parts.scorer,
        recording=parts.recording,
        schedule=config.schedule,
        rollout=config.rollout,
        clock=clock,
    )
    display = Display(folder.path.name, config.training.steps, config.observe)
    metrics = MetricsWriter(folder.path, tensorboard=config.observe.tensorboard)
    summary = RunSummary(config)
    for line in parts.describe():
        display.message(line)

    def evaluate(step: int) -> None:
        if parts.evaluator is None:
            return
        with clock.phase("evaluate"):
            result = parts.evaluator.run(parts.engine.policy_version)
        metrics.write(step, "evaluation", result.metrics())
        display.evaluation(step, result.accuracy, str(result))
        summary.evaluations[step] = result

    try:
        evaluate(0)
        for step in range(1, config.training.steps + 1):
            version = parts.engine.policy_version
            scored = schedule.next_batch()
            with clock.phase("pack"):
                minibatches = [
                    pack(scored[first :: config.schedule.minibatches], config.training.tokens_per_microbatch)
                    for first in range(config.schedule.minibatches)
                ]
            for batches in minibatches:
                with clock.phase("train"):
                    step_metrics = learner.step(batches, current_version=version)
                clock.count_tokens("train", sum(len(batch.input_ids) for batch in batches))
            with clock.phase("weights"):
                parts.engine.load_weights(named_weights(parts.student), version + 1)

            times = clock.take()
            total += times
            metrics.write(step, "train", step_metrics | times.metrics())
            display.step(step, step_metrics, times)
            last = step == config.training.steps
            if last or (config.evaluation.every and step % config.evaluation.every == 0):
                evaluate(step)
            if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
                with clock.phase("checkpoint"):
                    folder.save_student(step, parts.student, parts.tokenizer, keep=config.checkpoint.keep)
        summary.times = total + clock.take()
    finally:
        display.close()
        metrics.close()
    return summary

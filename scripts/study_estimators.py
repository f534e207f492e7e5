"""Bias and variance of the objectives' gradients against the dense ones, as rollouts get stale.

    python scripts/study_estimators.py --student RUN_OR_MODEL --teacher RUN_OR_MODEL --output DIR
        [--prompts 16] [--redraws 64] [--batches 32] [--section.option value ...]

The student takes a few real steps of on-policy distillation, under the settings of `--config`. The last policy is the
current one; the policies s steps before it are those that wrote. Two parts, both against the gradient over the whole
vocabulary:

1. at fixed prefixes: bias, exactly, by going through the vocabulary; variance over redraws of the samples;
2. over fresh prompts and rollouts of the stale policies: what their prefixes change, and the whole variance.

Prints a report in Markdown and writes it, with its plots, to DIR/report.md. The exit status is 1 when the variance of m
samples is not one sample's over m. About 5 minutes on one core with the demo's models.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from pathlib import Path

import torch
from bench_gather_stats import cpu_model
from estimators.fixed_prefixes import measure_fixed_prefixes
from estimators.fresh_batches import measure_fresh_batches
from estimators.gradients import GradientSketch
from estimators.policies import train_chain
from estimators.report import DEFINITIONS, failed_checks, write_report

from titan_opd.config import load_config
from titan_opd.parallel import open_world


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--student", required=True, help="model folder, or a run's folder: its newest checkpoint")
    parser.add_argument("--teacher", required=True, help="the same, of the teacher")
    parser.add_argument("--output", type=Path, required=True, help="folder for report.md and its plots")
    parser.add_argument(
        "--config",
        default="train_configs/arithmetic/distill.toml",
        help="how the student is trained and on what; options of the file may follow as --section.option value",
    )
    parser.add_argument("--prompts", type=int, default=16, help="answers in a batch, and behind the fixed prefixes")
    parser.add_argument("--redraws", type=int, default=64, help="of the samples at the fixed prefixes")
    parser.add_argument("--batches", type=int, default=32, help="of fresh prompts")
    parser.add_argument("--sketch", type=int, default=256, help="numbers that a gradient is projected to")
    options, overrides = parser.parse_known_args()
    for name, least in {"prompts": 1, "redraws": 3, "batches": 3, "sketch": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)} must be at least {least}")
    models = ["--student.path", options.student, "--teacher.path", options.teacher]
    try:
        return study(options, [*models, *overrides])
    except ValueError as error:
        parser.error(str(error))


def study(options: argparse.Namespace, overrides: list[str]) -> int:
    """Measure, report, and return the exit status."""
    start = time.perf_counter()
    config = load_config(options.config, overrides)
    with open_world() as world:
        chain = train_chain(config, world)
        progress(start, f"{chain.version} steps of distillation")
        num_parameters = sum(parameter.numel() for parameter in chain.current.parameters())
        sketch = GradientSketch(num_parameters, options.sketch, seed=config.run.seed)
        fixed = measure_fixed_prefixes(chain, num_answers=options.prompts, num_redraws=options.redraws, sketch=sketch)
        progress(start, f"bias and variance at {fixed.num_prefixes} fixed prefixes")
        fresh = measure_fresh_batches(
            chain, num_batches=options.batches, answers_per_batch=options.prompts, sketch=sketch
        )
        progress(start, "fresh batches")
    title = (
        f"`{options.student}` ({num_parameters / 1e6:.2f} M parameters) towards `{options.teacher}`, settings of "
        f"`{options.config}` (learning rate {config.optimizer.learning_rate:g}); {options.redraws} redraws; "
        f"{cpu_model()}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python "
        f"{platform.python_version()}; {time.perf_counter() - start:.0f} s."
    )
    definitions = DEFINITIONS.format(
        steps=chain.version, sketch=options.sketch, sketch_error=math.sqrt(2 / options.sketch)
    )
    print(write_report(options.output, title, definitions, fixed, fresh))
    return 1 if failed_checks(fixed) else 0


def progress(start: float, done: str) -> None:
    print(f"[{time.perf_counter() - start:5.0f} s] {done}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""The demo: what on-policy distillation does where answers are scarce, a good teacher exists and prompts are free.

A teacher learns sums from plenty of worked answers. A smaller student warm-starts on a few of them, then distils
on-policy on fresh prompts. The control spends as many steps on more cross-entropy over the same few answers. These are
four runs of `titan-opd train`, with the TOML files of train_configs/arithmetic.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

from titan_opd.config import load_config
from titan_opd.observe import make_table, print_tables
from titan_opd.run import RunSummary
from titan_opd.train import train

CONFIGS = Path("train_configs/arithmetic")
RUNS = {
    "teacher": "a teacher learns from plenty of worked answers",
    "warm_start": "a smaller student starts from 200 of them",
    "distill": "it distils on-policy: it answers fresh prompts, the teacher scores every token",
    "control": "the control: more cross-entropy on the same 200 answers",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of weights, data order and sampling")
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/arithmetic"), help="emptied, then filled with the runs"
    )
    options = parser.parse_args()

    shutil.rmtree(options.directory, ignore_errors=True)
    summaries: dict[str, RunSummary] = {}
    seconds: dict[str, float] = {}
    for number, (name, story) in enumerate(RUNS.items(), 1):
        print(f"\n{number}/{len(RUNS)} {name}: {story}", flush=True)
        overrides = ["--run.directory", str(options.directory / name), "--run.seed", str(options.seed)]
        if name in ("distill", "control"):
            overrides += ["--student.path", str(options.directory / "warm_start")]
        if name == "distill":
            overrides += ["--teacher.path", str(options.directory / "teacher")]
        start = time.perf_counter()
        summaries[name] = train(load_config(CONFIGS / f"{name}.toml", overrides))
        seconds[name] = time.perf_counter() - start

    distill = summaries["distill"]
    rows = [
        ("teacher", summaries["teacher"].after),
        ("student before", distill.before),
        ("student distilled", distill.after),
        ("control", summaries["control"].after),
    ]
    print_tables(
        [
            *distill.tables(),
            make_table(
                "Seconds by run", ("run", "seconds"), [(name, f"{taken:.0f}") for name, taken in seconds.items()]
            ),
            make_table(
                f"Demo, seed {options.seed}",
                ("", "exact match", "KL to the teacher (nats a token)"),
                [
                    (
                        label,
                        f"{metrics['accuracy']:.1%}",
                        f"{metrics['teacher_kl']:.3f}" if "teacher_kl" in metrics else "",
                    )
                    for label, metrics in rows
                ],
            ),
        ]
    )


if __name__ == "__main__":
    main()

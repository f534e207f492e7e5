"""Let a run's teacher, or its student, answer the run's training prompts, and write the answers as a file of prompts.

    python scripts/write_answers.py CONFIG OUT.jsonl [--model teacher|student] [--section.key VALUE ...]

Cross-entropy on the teacher's answers is sequence-level distillation:

    titan-opd train my.toml --data.task files --data.train OUT.jsonl --rollout.engine answers \\
        --objective.kind cross_entropy --teacher.engine none

(for the arithmetic task with --data.template plain). Each prompt is answered once, under rollout.sampling.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from titan_opd.config import load_config
from titan_opd.write_answers import MODELS, write_answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", metavar="CONFIG", help="TOML file of a run")
    parser.add_argument("out", metavar="OUT.jsonl", type=Path, help="new file")
    parser.add_argument("--model", choices=MODELS, default="teacher", help="who answers")
    options, overrides = parser.parse_known_args()
    try:
        written = write_answers(load_config(options.config, overrides), options.out, model=options.model)
    except ValueError as error:
        parser.exit(2, f"write_answers: error: {error}\n")
    print(f"wrote {written} to {options.out}")


if __name__ == "__main__":
    main()

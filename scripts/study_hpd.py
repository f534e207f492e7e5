"""Hybrid policy distillation against its alternatives, on answers that the teacher wrote, on the demo's sums.

    python scripts/study_hpd.py --teacher RUN_OR_MODEL --student RUN_OR_MODEL --output DIR [--jobs 2]

The student is the demo's warm start (runs/arithmetic/warm_start), the teacher the demo's. scripts/hpd/protocol.py is
the protocol, written before any run. A finished run is a line of DIR/results.jsonl and is not run again: the same
command goes on after an interruption. Prints the report and writes it, with its plots, to DIR/report.md. 36 runs of 200
steps, about 15 minutes with two jobs on two idle cores.
"""

from __future__ import annotations

import argparse
import os
import platform
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its threads; each job is one

from bench_gather_stats import cpu_model
from hpd.protocol import SMOKE, TEACHER_ANSWERS, Protocol, report_jobs, selection_jobs
from hpd.report import choose_rates, write_report
from hpd.runs import Study, measure, prepare, run_jobs
from study_jobs import read_rows

from titan_opd import __version__
from titan_opd.checkpoint import model_folder
from titan_opd.evaluation import grade_exact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", required=True, help="model folder, or a run's folder: its newest checkpoint")
    parser.add_argument("--student", required=True, help="the same, of the student that all methods start from")
    parser.add_argument("--output", required=True, type=Path, help="folder for the answers, the results and the report")
    parser.add_argument("--answers", type=int, help="of the teacher, when the protocol's rule asks for another number")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--smoke", action="store_true", help="a few tiny runs that show that it works and nothing else")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs} must be at least 1")
    protocol = SMOKE if options.smoke else Protocol()
    if options.answers is not None:
        protocol = replace(protocol, num_answers=options.answers)
    try:
        study = Study(options.output, model_folder(options.teacher), model_folder(options.student), protocol)
        prepare(study)
        print(run_study(study, options.jobs))
    except ValueError as error:
        parser.error(str(error))


def run_study(study: Study, jobs: int) -> str:
    """Run what has not been run yet, and write the report."""
    protocol = study.protocol
    selection = run_jobs(study, selection_jobs(protocol), jobs)
    rates = choose_rates(selection)
    reported = run_jobs(study, report_jobs(protocol, rates), jobs)
    _, test = study.held_out()
    references = {
        "student before": measure(study.student, test, protocol),
        "teacher": measure(study.teacher, test, protocol),
    }
    rows = read_rows(study.output / TEACHER_ANSWERS)
    right = sum(grade_exact(row["response"], row["answer"]) for row in rows)
    title = (
        f"Student `{study.student}`, teacher `{study.teacher}`; {len(rows)} of {protocol.num_answers} answers of the "
        f"teacher ended, {right} of them are right; {protocol.steps} steps of {protocol.batch} answers; titan_opd "
        f"{__version__}, {cpu_model()}, {platform.python_implementation()} {platform.python_version()}, {jobs} runs at "
        "a time, one thread each."
    )
    return write_report(study.output, title, protocol, selection, reported, references)


if __name__ == "__main__":
    main()

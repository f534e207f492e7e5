"""How learning suffers from stale answers: forward KL and policy gradient, on the demo's sums.

    python scripts/study_staleness.py --teacher RUN_OR_MODEL --student RUN_OR_MODEL --output DIR [--jobs 2]

The student is the demo's warm start (runs/arithmetic/warm_start), the teacher the demo's. scripts/staleness/protocol.py
is the protocol, written before the runs that are reported. A finished run is a line of DIR/results.jsonl and is not
run again: the same command goes on after an interruption. Prints the report and writes it, with its plots, to
DIR/report.md.
63 runs of 80 steps, about 10 minutes with two jobs on two idle cores.
"""

from __future__ import annotations

import argparse
import os
import platform
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its threads; each job is one

from bench_gather_stats import cpu_model
from staleness.protocol import SMOKE, Protocol, report_jobs, selection_jobs
from staleness.report import choose_rates, write_report
from staleness.runs import Study, measure, prepare, run_jobs

from titan_opd import __version__
from titan_opd.checkpoint import model_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", required=True, help="model folder, or a run's folder: its newest checkpoint")
    parser.add_argument("--student", required=True, help="the same, of the student that all runs start from")
    parser.add_argument("--output", required=True, type=Path, help="folder for the results and the report")
    parser.add_argument("--seeds", type=int, nargs="+", help="of the protocol's, to report before all are done")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--smoke", action="store_true", help="a few tiny runs that show that it works and nothing else")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs} must be at least 1")
    protocol = SMOKE if options.smoke else Protocol()
    seeds = tuple(options.seeds or protocol.report_seeds)
    if not set(seeds) <= set(protocol.report_seeds):
        parser.error(f"--seeds {' '.join(map(str, seeds))}: the protocol's are {protocol.report_seeds}")
    try:
        study = Study(options.output, model_folder(options.teacher), model_folder(options.student), protocol)
        prepare(study)
        print(run_study(study, seeds, options.jobs))
    except ValueError as error:
        parser.error(str(error))


def run_study(study: Study, seeds: tuple[int, ...], jobs: int) -> str:
    """Run what has not been run yet, and write the report on these seeds."""
    selection = run_jobs(study, selection_jobs(study.protocol), jobs)
    protocol = replace(study.protocol, report_seeds=seeds)
    wanted = report_jobs(protocol, choose_rates(selection))
    reported = run_jobs(study, wanted, jobs)
    title = (
        f"Student `{study.student}`, teacher `{study.teacher}`; {protocol.steps} steps of {protocol.batch} answers; "
        f"titan_opd {__version__}, {cpu_model()}, Python {platform.python_version()}, one thread a run."
    )
    return write_report(study.output, title, protocol, selection, reported, measure(study, wanted[0]))


if __name__ == "__main__":
    main()

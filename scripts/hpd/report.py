"""The study's page in Markdown, with its plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from svg_plot import Line, write_plot

from .protocol import METHODS, Job, Protocol

Records = dict[Job, dict[str, Any]]
PLOTS = {
    "exact_match": ("exact_match.svg", "Exact match on the test problems", "exact match, greedy"),
    "entropy": ("entropy.svg", "The student's entropy", "nats a token"),
}


def choose_rates(selection: Records) -> dict[str, float]:
    """Each method's learning rate: the best on the selection problems, at equality the lower."""
    return {
        method: max(
            (job for job in selection if job.method == method),
            key=lambda job: (selection[job]["selection"], -job.learning_rate),
        ).learning_rate
        for method in METHODS
    }


def write_report(
    folder: Path,
    title: str,
    protocol: Protocol,
    selection: Records,
    reported: Records,
    references: dict[str, dict[str, float]],
) -> str:
    """Write `report.md` and its plots into `folder`; returns the page.

    Args:
        title: the models and the machine.
        selection, reported: the records of both kinds of runs.
        references: the measures of what is not trained here: the student before, the teacher.
    """
    for measure, (name, heading, label) in PLOTS.items():
        lines = [_line(method, measure, reported, references["student before"]) for method in METHODS]
        write_plot(folder / name, heading, lines, x_label="optimizer steps", y_label=label)
    problems = (
        f"{protocol.num_test} test problems: the standard error of one run's exact match is at most "
        f"{50 / protocol.num_test**0.5:.1f} points, and the problems are the same for all. Mean and standard deviation "
        f"over the seeds {', '.join(map(str, protocol.report_seeds))}. scripts/hpd/protocol.py is the protocol."
    )
    page = "\n\n".join(
        [
            f"# Hybrid policy distillation on answers that the teacher wrote\n\n{title}\n\n{problems}",
            _results(reported, references),
            *(f"![{heading}]({name})" for name, heading, _ in PLOTS.values()),
            f"Selection: greedy exact match on {protocol.num_selection} other problems after the last step, seed "
            f"{protocol.selection_seed}.\n\n{_selection(selection, protocol)}",
        ]
    )
    (folder / "report.md").write_text(page + "\n")
    return page


def _results(reported: Records, references: dict[str, dict[str, float]]) -> str:
    rows: list[Sequence[object]] = []
    for method in METHODS:
        records = {job: record for job, record in reported.items() if job.method == method}
        last = [record["curve"][-1] for record in records.values()]
        rows.append(
            (
                method,
                f"{next(iter(records)).learning_rate:g}",
                _percent([measures["exact_match"] for measures in last]),
                _percent([measures["exact_match_sampled"] for measures in last]),
                _spread([measures["entropy"] for measures in last], "{:.3f}"),
                f"{mean(record['seconds'] for record in records.values()):.0f}",
            )
        )
    for name, measures in references.items():
        shares = (f"{measures[key]:.1%}" for key in ("exact_match", "exact_match_sampled"))
        rows.append((f"*{name}*", "", *shares, f"{measures['entropy']:.3f}", ""))
    header = ("method", "learning rate", "exact match", "at temperature 1", "entropy, nats", "seconds a run")
    return _table(header, rows)


def _selection(selection: Records, protocol: Protocol) -> str:
    rows = [
        (method, *(f"{selection[Job(method, rate, protocol.selection_seed)]['selection']:.1%}" for rate in rates))
        for method in METHODS
        for rates in [protocol.learning_rates]
    ]
    return _table(("method", *(f"{rate:g}" for rate in protocol.learning_rates)), rows)


def _line(method: str, measure: str, reported: Records, before: dict[str, float]) -> Line:
    curves = [record["curve"] for job, record in reported.items() if job.method == method]
    points = [(0, [before[measure]])]
    points += [(at[0]["step"], [measures[measure] for measures in at]) for at in zip(*curves, strict=True)]
    return Line(
        method,
        xs=[step for step, _ in points],
        ys=[mean(values) for _, values in points],
        errors=[_deviation(values) for _, values in points],
        dashed=method in ("SFT", "sequence KD"),
    )


def _percent(shares: Sequence[float]) -> str:
    return _spread([100 * share for share in shares], "{:.1f}") + " %"


def _spread(values: Sequence[float], number: str) -> str:
    return f"{number.format(mean(values))} ± {number.format(_deviation(values))}"


def _deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)

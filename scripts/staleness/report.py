"""The study's page in Markdown, with its plots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, variance
from typing import Any

from svg_plot import Line, write_plot

from .protocol import ADVANTAGES, FORWARD_KL, METHODS, SAMPLES_M, Job, Protocol

Records = dict[Job, dict[str, Any]]
PLOTS = {
    "exact_match": ("staleness_exact_match.svg", "Exact match after the last step", "exact match, greedy, %", 100.0),
    "teacher_kl": ("staleness_kl.svg", "Distance to the teacher after the last step", "KL, nats a token", 1.0),
}


def choose_rates(selection: Records) -> dict[str, float]:
    """Each family's learning rate: the best mean on the selection problems, at equality the lower."""
    found: dict[str, dict[float, list[float]]] = {}
    for job, record in selection.items():
        rates = found.setdefault(METHODS[job.method].family, {})
        rates.setdefault(job.learning_rate, []).append(record["exact_match"])
    return {family: max(rates, key=lambda rate: (mean(rates[rate]), -rate)) for family, rates in found.items()}


@dataclass(frozen=True)
class Cell:
    """A measure of one method at one staleness: the mean over seeds, and its standard error (NaN for one seed)."""

    mean: float
    error: float

    def minus(self, other: Cell) -> Cell:
        return Cell(self.mean - other.mean, math.hypot(self.error, other.error))

    @property
    def counts(self) -> bool:
        """Whether it differs from 0 by more than twice its error."""
        return abs(self.mean) > 2 * self.error

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if math.isnan(self.error) else f"{self.mean:.1f} ± {self.error:.1f}"


def cells(reported: Records, measure: str, factor: float = 1.0) -> dict[tuple[str, int], Cell]:
    """By method and staleness; the variance over seeds is pooled over a method's staleness values."""
    values: dict[str, dict[int, list[float]]] = {}
    for job, record in reported.items():
        values.setdefault(job.method, {}).setdefault(job.staleness, []).append(factor * record[measure])
    found = {}
    for method, by_staleness in values.items():
        several = [variance(seeds) for seeds in by_staleness.values() if len(seeds) > 1]
        pooled = mean(several) if several else math.nan
        for staleness, seeds in by_staleness.items():
            found[method, staleness] = Cell(mean(seeds), math.sqrt(pooled / len(seeds)))
    return found


def verdicts(found: dict[tuple[str, int], Cell], protocol: Protocol) -> list[str]:
    """The protocol's questions, answered; `found` is exact match in percent."""
    stale = [staleness for staleness in protocol.staleness if staleness > 0]
    losses = {s: found[FORWARD_KL, s].minus(found[FORWARD_KL, 0]) for s in stale}
    told = ", ".join(f"{losses[s]} points at s = {s}" for s in stale)
    if any(loss.counts for loss in losses.values()):
        flat = "**No**"
    elif all(loss.error <= protocol.flat_error for loss in losses.values()):
        flat = "**Yes**, within the error"
    else:
        flat = "**Undecided**, the error is too large or unknown"
    lines = [f"Is the forward KL flat in staleness? {flat}: {told}, against s = 0."]
    for num_samples in SAMPLES_M:
        gains = {}
        for s in stale:
            rollout, learner = (found[f"{advantage}, m = {num_samples}", s] for advantage in ADVANTAGES)
            gains[s] = learner.minus(rollout)
        told = ", ".join(f"{gains[s]} points at s = {s}" for s in stale)
        above = [s for s in stale if gains[s].counts and gains[s].mean > 0]
        below = [s for s in stale if gains[s].counts and gains[s].mean < 0]
        answer = _above(above, below)
        lines.append(f"Is the learner's advantage above the rollout's, m = {num_samples}? {answer}: {told}.")
    return lines


def _above(above: list[int], below: list[int]) -> str:
    def at(values: list[int]) -> str:
        return ", ".join(f"s = {s}" for s in values)

    if above and below:
        return f"**Both ways**: above at {at(above)}, below at {at(below)}"
    if above:
        return f"**Yes**, at {at(above)}"
    return f"**No**, below it at {at(below)}" if below else "**Not by these numbers**"


def write_report(
    folder: Path, title: str, protocol: Protocol, selection: Records, reported: Records, before: dict[str, float]
) -> str:
    """Write `report.md` and its plots into `folder`; returns the page.

    Args:
        title: the models and the machine.
        selection, reported: the records of both kinds of runs.
        before: the test measures of the student before its first step.
    """
    rates = choose_rates(selection)
    for measure, (name, heading, label, factor) in PLOTS.items():
        found = cells(reported, measure, factor)
        lines = [_line(method, protocol, found) for method in METHODS]
        write_plot(folder / name, heading, lines, x_label="staleness, versions", y_label=label)
    exact = cells(reported, "exact_match", 100.0)
    chosen = ", ".join(f"{family} {rate:g}" for family, rate in rates.items())
    about = (
        f"{title} Greedy exact match on {protocol.num_test} test problems, {100 * before['exact_match']:.1f} % before "
        f"the first step; mean over {_seeds(protocol)}. "
        f"Learning rates by the rule: {chosen}. scripts/staleness/protocol.py is the protocol."
    )
    page = "\n\n".join(
        [
            about,
            _grid("exact match, %", protocol, lambda method, s: str(exact[method, s])),
            *verdicts(exact, protocol),
            *(f"![{heading}]({name})" for name, heading, _, _ in PLOTS.values()),
            f"KL(student || teacher) on the greedy answers, nats a token; {before['teacher_kl']:.3f} before.",
            _grid("KL", protocol, lambda method, s: f"{_mean(reported, method, s, 'teacher_kl'):.3f}"),
            "Effective share of samples (E rho)² / E rho², rho the importance ratio; mean over the second half of the "
            "steps.",
            _grid(
                "effective share",
                protocol,
                lambda method, s: f"{_mean(reported, method, s, 'effective_sample_share'):.3f}",
                [method for method in METHODS if method != FORWARD_KL],
            ),
            f"Selection: exact match on {protocol.num_selection} other problems at s = {protocol.selection_staleness}, "
            f"seed {protocol.selection_seed}.",
            _selection(selection, protocol),
        ]
    )
    (folder / "report.md").write_text(page + "\n")
    return page


def _seeds(protocol: Protocol) -> str:
    seeds = ", ".join(map(str, protocol.report_seeds))
    if len(protocol.report_seeds) == 1:
        return f"the one seed {seeds}, whose error is not known"
    return f"the seeds {seeds} ± its standard error"


def _mean(reported: Records, method: str, staleness: int, measure: str) -> float:
    return mean(
        record[measure] for job, record in reported.items() if (job.method, job.staleness) == (method, staleness)
    )


def _line(method: str, protocol: Protocol, found: dict[tuple[str, int], Cell]) -> Line:
    at = [found[method, s] for s in protocol.staleness]
    errors = [0.0 if math.isnan(cell.error) else cell.error for cell in at]
    return Line(
        method, protocol.staleness, [cell.mean for cell in at], errors, dashed=METHODS[method].advantage == "rollout"
    )


def _grid(corner: str, protocol: Protocol, cell: Any, methods: Sequence[str] = tuple(METHODS)) -> str:
    rows = [(method, *(cell(method, s) for s in protocol.staleness)) for method in methods]
    return _table((corner, *(f"s = {s}" for s in protocol.staleness)), rows)


def _selection(selection: Records, protocol: Protocol) -> str:
    rows = []
    for method in dict.fromkeys(job.method for job in selection):
        shares = [
            selection[Job(method, protocol.selection_staleness, rate, protocol.selection_seed)]["exact_match"]
            for rate in protocol.learning_rates
        ]
        rows.append((method, *(f"{share:.1%}" for share in shares)))
    return _table(("learning rate", *(f"{rate:g}" for rate in protocol.learning_rates)), rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)

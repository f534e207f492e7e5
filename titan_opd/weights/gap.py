"""How far the engines' log-probabilities are from the trainer's, as metrics of a run.

Trainer and engine add in different orders and round at different places, so that their gap is not 0 with the right
weights either. The noise floor says how large that is: it is the smallest gap of the run's steps so far. A gap that
rises from the floor is seen long before it crosses the probe's tolerance, which is the alarm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

GAP, FLOOR = "weights/probe_gap", "weights/probe_floor"


def gap_metrics(gaps: Iterable[float | None]) -> dict[str, float]:
    """The largest of the engines' newest gaps (`receiver.check_probe`), in nats a token; nothing without a probe."""
    found = [gap for gap in gaps if gap is not None]
    return {GAP: max(found)} if found else {}


def floor_metrics(metrics: Mapping[str, float], floor: float | None) -> dict[str, float]:
    """The noise floor after a step.

    Args:
        metrics: of the step.
        floor: after the step before; None before the first gap.
    """
    known = [value for value in (metrics.get(GAP), floor) if value is not None]
    return {FLOOR: min(known)} if known else {}

"""What is told of a run at its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.table import Table

from titan_opd.observe import PhaseTimes, make_table, phase_table


@dataclass
class RunSummary:
    """What a run found and where its time went.

    Attributes:
        evaluations: the metrics of each evaluation, by step, from the run's beginning.
        times: by phase, since the run's last start.
    """

    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    times: PhaseTimes = field(default_factory=PhaseTimes)

    @property
    def before(self) -> dict[str, float]:
        """The metrics of the first evaluation."""
        return self.evaluations[min(self.evaluations)]

    @property
    def after(self) -> dict[str, float]:
        """The metrics of the last evaluation."""
        return self.evaluations[max(self.evaluations)]

    def tables(self) -> list[Table]:
        """The final tables: what was learned, and where the time went (of a finished run that is resumed, nowhere)."""
        learned = [self._evaluation_table()] if self.evaluations else []
        return learned + ([phase_table(self.times)] if self.times.seconds else [])

    def _evaluation_table(self) -> Table:
        names = list(self.before)
        rows = [
            (f"after step {step}", *(f"{metrics[name]:.4g}" for name in names))
            for step, metrics in self.evaluations.items()
        ]
        return make_table("Evaluation", ("", *names), rows)

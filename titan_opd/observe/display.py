"""What a person sees while a run goes on: a live panel in a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from titan_opd.config.schema import ObserveConfig
from titan_opd.observe.clock import PhaseTimes


class Display:
    """Progress of one run.

    In a terminal: one line that is rewritten at each step. Elsewhere (a log file, CI): a plain line every `log_every`
    steps. Messages are printed above the live line.
    """

    def __init__(self, title: str, num_steps: int, config: ObserveConfig) -> None:
        self.console = Console(highlight=False)
        self._num_steps = num_steps
        self._log_every = config.log_every
        self._plain = config.progress and not self.console.is_terminal
        self._accuracy = ""
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (config.progress and self.console.is_terminal),
        )
        self._task = self._bar.add_task(title, total=num_steps, status="")
        self._bar.start()

    def message(self, text: str) -> None:
        """A line that stays."""
        self._bar.console.print(text, soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float], times: PhaseTimes) -> None:
        """Show the state after `step` steps."""
        speeds = " ".join(f"{name} {_short(speed)}" for name, speed in times.tokens_per_second().items())
        status = f"loss {metrics['loss']:.4f}  {self._accuracy}tokens/s: {speeds}"
        self._bar.update(self._task, completed=step, status=status)
        if self._plain and (step % self._log_every == 0 or step == self._num_steps):
            self.console.print(f"step {step}/{self._num_steps}  {status}", soft_wrap=True)

    def evaluation(self, step: int, accuracy: float, description: str) -> None:
        """A line about an evaluation; its accuracy stays in view from now on."""
        self._accuracy = f"accuracy {accuracy:.1%}  "
        self.message(f"after {step} steps: {description}")

    def close(self) -> None:
        """End the live line; messages can still be printed."""
        self._bar.stop()


def phase_table(times: PhaseTimes, title: str = "Time by phase") -> Table:
    """Seconds, share and tokens/s of each phase."""
    total = sum(times.seconds.values()) or 1.0
    speeds = times.tokens_per_second()
    rows = [
        (name, f"{seconds:.1f}", f"{seconds / total:.0%}", _short(speeds[name]) if name in speeds else "")
        for name, seconds in times.seconds.items()
    ]
    return make_table(title, ("phase", "seconds", "share", "tokens/s"), rows)


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def print_tables(tables: Sequence[Table]) -> None:
    """Print tables to the terminal, or as plain text elsewhere."""
    console = Console(highlight=False)
    for table in tables:
        console.print(table)


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 10_000 else f"{number:.0f}"

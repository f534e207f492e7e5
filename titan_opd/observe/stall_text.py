"""A stall report for people: tables in a terminal, plain text in a file."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from titan_opd.observe.diagnosis import RunState, StallReport, WorkerState, diagnose
from titan_opd.observe.display import make_table

MAX_LEASES = 8  # of one worker that are listed


def print_report(report: StallReport) -> None:
    """Print the report to stderr, in colour when that is a terminal."""
    _print(report, Console(stderr=True, highlight=False))


def report_text(report: StallReport) -> str:
    """The report as plain text."""
    file = io.StringIO()
    _print(report, Console(file=file, width=120, highlight=False))
    return file.getvalue()


def _print(report: StallReport, console: Console) -> None:
    for part in _parts(report):
        console.print(part)


def _parts(report: StallReport) -> Iterator[RenderableType]:
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    yield f"[bold]{when}: nothing has moved for {report.quiet_seconds:.0f} s[/bold]\n"
    yield "Most likely causes"
    for number, cause in enumerate(diagnose(report), start=1):
        yield Padding(f"{number}. {escape(cause)}", (0, 0, 0, 2))
    yield ""
    rows = [(escape(what), f"{age:.0f} s ago") for what, age in sorted(report.progress.items(), key=lambda row: row[1])]
    yield make_table("Last progress", ("what", "when"), rows)
    if report.state is not None:
        yield from _state_parts(report.state)
    if report.free_bytes is not None:
        yield f"free on the disk of {escape(str(report.run_directory))}: {report.free_bytes / (1 << 30):.1f} GiB\n"


def _state_parts(state: RunState) -> Iterator[RenderableType]:
    if state.training:
        doing = "trains"
    elif state.waiting_role is None:
        doing = "has a batch ready for it"
    else:
        numbers = ", ".join(map(str, state.waiting_numbers[:MAX_LEASES])) or "any"
        doing = f"waits for {state.waiting_role} ({state.waiting_reason}; samples: {numbers})"
    yield f"policy version {state.version}; the trainer {doing}\n"
    yield make_table("Samples", tuple(state.queues), [tuple(str(count) for count in state.queues.values())])
    yield _worker_table(state)


def _worker_table(state: RunState) -> Table:
    rows = [_worker_row(worker, state.lease_seconds) for worker in state.workers]
    rows += [("-", escape(missing), "missing", "", "", "", "") for missing in state.missing_roles]
    columns = ("name", "role", "state", "waits for", "version", "last heard", "leases (sample: age)")
    return make_table("Workers", columns, rows)


def _worker_row(worker: WorkerState, lease_seconds: float) -> tuple[str, ...]:
    doing = "working" if worker.leases else "waiting"
    if worker.silent > lease_seconds:
        doing = "silent"
    leases = ", ".join(f"{lease.number}: {lease.age:.0f} s" for lease in worker.leases[:MAX_LEASES])
    more = len(worker.leases) - MAX_LEASES
    return (
        escape(worker.name),
        worker.role,
        doing,
        worker.waits_for,
        "" if worker.version is None else str(worker.version),
        f"{worker.silent:.0f} s ago",
        leases + (f" and {more} more" if more > 0 else ""),
    )

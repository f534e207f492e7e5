"""Metrics, progress, time by phase, the trace of a run and its watchdog."""

from titan_opd.observe.clock import PhaseClock, PhaseTimes
from titan_opd.observe.diagnosis import RunState
from titan_opd.observe.display import Display, make_table, phase_table, print_tables
from titan_opd.observe.metrics import MetricsWriter, read_metrics
from titan_opd.observe.stacks import offer_stacks, request_stacks
from titan_opd.observe.staleness import staleness_counts, staleness_metrics
from titan_opd.observe.trace import ClockOffset, ClockSample, Tracer, machine_id, open_tracer
from titan_opd.observe.trace_merge import merge_trace
from titan_opd.observe.watchdog import Watchdog

__all__ = [
    "ClockOffset",
    "ClockSample",
    "Display",
    "MetricsWriter",
    "PhaseClock",
    "PhaseTimes",
    "RunState",
    "Tracer",
    "Watchdog",
    "machine_id",
    "make_table",
    "merge_trace",
    "offer_stacks",
    "open_tracer",
    "phase_table",
    "print_tables",
    "read_metrics",
    "request_stacks",
    "staleness_counts",
    "staleness_metrics",
]

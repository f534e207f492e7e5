"""Metrics, progress and time by phase."""

from titan_opd.observe.clock import PhaseClock, PhaseTimes
from titan_opd.observe.display import Display, make_table, phase_table, print_tables
from titan_opd.observe.metrics import MetricsWriter, read_metrics

__all__ = [
    "Display",
    "MetricsWriter",
    "PhaseClock",
    "PhaseTimes",
    "make_table",
    "phase_table",
    "print_tables",
    "read_metrics",
]

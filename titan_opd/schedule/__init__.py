"""Who may start which prompt when."""

from titan_opd.schedule.conductor import Conductor
from titan_opd.schedule.headers import (
    AnswerHeader,
    Batch,
    BatchEntry,
    Orders,
    Release,
    RolloutLease,
    ScoringLease,
    Waiting,
)
from titan_opd.schedule.journal import JOURNAL_FILE, Journal, TrainedSample
from titan_opd.schedule.report import Report
from titan_opd.schedule.rules import ScheduleRules
from titan_opd.schedule.sync import SyncSchedule

__all__ = [
    "JOURNAL_FILE",
    "AnswerHeader",
    "Batch",
    "BatchEntry",
    "Conductor",
    "Journal",
    "Orders",
    "Release",
    "Report",
    "RolloutLease",
    "ScheduleRules",
    "ScoringLease",
    "SyncSchedule",
    "TrainedSample",
    "Waiting",
]

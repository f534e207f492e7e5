"""Who may start which prompt when."""

from titan_opd.schedule.journal import JOURNAL_FILE, Journal, TrainedSample
from titan_opd.schedule.sync import SyncSchedule

__all__ = ["JOURNAL_FILE", "Journal", "SyncSchedule", "TrainedSample"]

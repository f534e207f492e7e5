"""Who may start which prompt when."""

from titan_opd.schedule.sync import SyncSchedule

__all__ = ["SyncSchedule"]

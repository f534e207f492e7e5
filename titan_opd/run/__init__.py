"""A run: its folder, its logs, its checkpoints, and what is told of it at its end."""

from titan_opd.run.folder import check_directory, pin_teacher
from titan_opd.run.run import Run
from titan_opd.run.summary import RunSummary

__all__ = ["Run", "RunSummary", "check_directory", "pin_teacher"]

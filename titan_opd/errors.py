"""Errors that are no fault of the settings. (What a user can mend in them is a ValueError.)"""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; what there was before is as it was."""

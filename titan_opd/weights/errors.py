"""What can go wrong with an update of the weights."""

from __future__ import annotations

from titan_opd.errors import WeightError


class LayoutError(WeightError):
    """The weights are not those of the engine's model. Found before a byte is written; trying again does not help."""


class TransferError(WeightError):
    """The bytes did not come, or not in time."""


class VerificationError(WeightError):
    """What the engine holds is not what the trainer sent."""

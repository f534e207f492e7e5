"""What can go wrong with an update of the weights."""

from __future__ import annotations


class WeightError(RuntimeError):
    """An update that cannot be used; the text names the tensor, the policy version and who has it."""


class LayoutError(WeightError):
    """The weights are not those of the engine's model. Found before a byte is written; trying again does not help."""


class TransferError(WeightError):
    """The bytes did not come, or not in time."""


class VerificationError(WeightError):
    """What the engine holds is not what the trainer sent."""

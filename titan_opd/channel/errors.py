"""What can go wrong between processes."""

from __future__ import annotations


class ChannelError(RuntimeError):
    """A peer is gone, silent, full, or sent what nobody can use.

    Attributes:
        sender: who is at fault, as far as that is known.
    """

    def __init__(self, message: str, *, sender: str = "") -> None:
        super().__init__(f"{sender}: {message}" if sender else message)
        self.sender = sender


class RefusedError(ChannelError):
    """The conductor does not take this worker, or not this message; the text is its reason."""

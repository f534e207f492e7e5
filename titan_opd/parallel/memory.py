"""Giving freed memory back to the system."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3  # of malloc.h
_THRESHOLD = 1 << 20  # bytes


def return_freed_tensors() -> None:
    """Let every freed CPU tensor above 1 MiB go back to the system at once.

    glibc raises its threshold, below which freed blocks stay in the process, up to 32 MiB. The layers' activations lie
    below it, and gradients and optimizer states that are allocated between them hold the gaps open: a training step's
    peak grew by a fifth (README.md has the numbers). A C library without this setting is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)

"""Giving freed memory back to the system."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Give the C library's free blocks back; where it has no such call, nothing happens.

    A program's first optimizer step allocates the optimizer's moments between activations that are freed afterwards.
    glibc would keep those gaps, and the peak of all later steps would stand on top of them.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

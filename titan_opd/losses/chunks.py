"""How many rows' logits are held at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator


def rows_per_chunk(num_rows: int, row_bytes: int, chunk_mb: float) -> int:
    """Rows of `row_bytes` bytes that fit `chunk_mb` MiB, at least 1, so that all chunks are of about equal sizes.

    A last chunk of a few rows would cost as much memory traffic for the projection as a full one.
    """
    rows_that_fit = max(1, int(chunk_mb * 2**20 / row_bytes))
    num_chunks = max(1, math.ceil(num_rows / rows_that_fit))
    return max(1, math.ceil(num_rows / num_chunks))


def row_chunks(num_rows: int, row_bytes: int, chunk_mb: float) -> Iterator[slice]:
    """Slices of `rows_per_chunk` rows; none without rows."""
    size = rows_per_chunk(num_rows, row_bytes, chunk_mb)
    for first in range(0, num_rows, size):
        yield slice(first, min(first + size, num_rows))

"""Metrics of a call, from metrics of rows: a few small sums on the device, never a synchronisation with the host."""

from __future__ import annotations

import torch
from torch import Tensor


class RowMetrics:
    """Sums up row metrics chunk by chunk.

    A metric is the mean over the rows that count (those of non-zero weight, each counting once whatever its weight), so
    calls combine by a mean weighted with their numbers of such rows; one whose name ends in "_max" is the largest
    value, and so combines.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        """Add a chunk's metrics, [C] each."""
        for name, values_C in metrics.items():
            if name.endswith("_max"):
                largest = torch.cat([values_C, values_C.new_zeros(1)]).amax()
                self._totals[name] = torch.maximum(self._totals[name], largest) if name in self._totals else largest
            else:
                self._totals[name] = self._totals.get(name, 0) + values_C.sum()

    def finish(self, num_rows: int) -> dict[str, Tensor]:
        """The metrics as scalars; 0 when no row counts."""
        means = {
            name: total if name.endswith("_max") else total / max(num_rows, 1) for name, total in self._totals.items()
        }
        if "importance_ratio_squared" in means:  # Kish's effective sample size, over the number of samples
            squared = means.pop("importance_ratio_squared")
            tiny = torch.finfo(squared.dtype).tiny
            means["effective_sample_share"] = means["importance_ratio"].square() / squared.clamp(min=tiny)
        return means

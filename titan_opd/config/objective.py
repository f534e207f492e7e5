"""`Objective`: which loss, on which support, with which correction. The mathematics is in `titan_opd/losses`."""

from __future__ import annotations

from dataclasses import dataclass

from titan_opd.config.options import check_section, option


@dataclass(frozen=True)
class Objective:
    """What is minimised (placeholder of the first commit: the losses' owner completes the fields)."""

    kind: str = option(doc="the divergence or estimator")

    def __post_init__(self) -> None:
        check_section(self, "objective")

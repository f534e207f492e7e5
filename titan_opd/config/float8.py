"""`[training.float8]`: products of the student's layers in 8-bit floating point while it trains."""

from __future__ import annotations

from dataclasses import dataclass

from titan_opd.config.options import check_section, option


@dataclass(frozen=True)
class Float8Config:
    """Products of the student's layers in 8-bit floating point (torchao, an extra); titan_opd/parallel/README.md.

    Weights, gradients, optimizer state, checkpoints and what the engines get stay as they are.
    """

    recipe: str = option(
        "none",
        "what shares a scale: 'tensorwise': a whole operand (fastest); 'rowwise': each row or column that a product "
        "sums over (most exact); 'none': products in `training.compute_dtype`",
        choices=("none", "tensorwise", "rowwise"),
    )
    emulate: bool = option(
        False, "round as float8 does and compute in `training.compute_dtype`: for tests where no device has float8"
    )

    def __post_init__(self) -> None:
        check_section(self, "float8")
        if self.emulate and self.recipe == "none":
            raise ValueError(
                "float8.emulate = true has no effect with float8.recipe = 'none'; leave it out, or set a recipe"
            )

"""Rotary position embeddings (arXiv 2104.09864), and the stretching of their frequencies that Llama 3.1 uses.

Shape suffixes: T packed tokens, N heads, D dimensions of a head, F = D / 2 frequencies.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_opd.models.keys import Keys


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching: long wavelengths are divided by `factor`, short ones stay, between them a smooth blend.

    Attributes:
        factor: by how much the context was lengthened.
        low_freq_factor, high_freq_factor: the original context over these gives the wavelengths, in tokens, above
            which all is stretched and below which nothing is.
        original_max_position_embeddings: the context before it was lengthened, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def apply(self, frequencies_F: Tensor) -> Tensor:
        wavelengths_F = 2 * math.pi / frequencies_F
        cycles_F = self.original_max_position_embeddings / wavelengths_F
        blend_F = (cycles_F - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend_F = blend_F.clamp(0, 1)
        return (1 - blend_F) * frequencies_F / self.factor + blend_F * frequencies_F

    def to_dict(self) -> dict[str, Any]:
        """The `rope_scaling` of a config.json."""
        return {"rope_type": "llama3", **asdict(self)}


def rope_cos_sin(
    positions_T: Tensor, head_dim: int, theta: float, scaling: Llama3Scaling | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each [T, 1, F]; computed in float32, then rounded to `dtype`.

    The frequencies are a few numbers made anew each time: a buffer would hold garbage after a model is built on the
    meta device and given storage, as sharded loading does.
    """
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_T.device) / head_dim
    frequencies_F = 1.0 / theta**exponents_F
    if scaling is not None:
        frequencies_F = scaling.apply(frequencies_F)
    angles_T1F = positions_T[:, None, None].float() * frequencies_F
    return angles_T1F.cos().to(dtype), angles_T1F.sin().to(dtype)


def rotate(heads_TND: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    """Turn each pair (d, d + D/2) of a head by its position's angle, Hugging Face's pairing."""
    if torch.compiler.is_compiling():  # which joins these passes by itself, and cannot write into parts of a tensor
        first_TNF, second_TNF = heads_TND.chunk(2, dim=-1)
        return torch.cat(
            (first_TNF * cos_T1F - second_TNF * sin_T1F, second_TNF * cos_T1F + first_TNF * sin_T1F), dim=-1
        )
    if not torch.is_grad_enabled():
        return _turned(heads_TND, cos_T1F, sin_T1F)
    return _Rotation.apply(heads_TND, cos_T1F, sin_T1F)


class _Rotation(torch.autograd.Function):
    """Four passes over half a head each, and no joining copy; turned back, the gradient is that of what was turned."""

    @staticmethod
    def forward(ctx: FunctionCtx, heads_TND: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1F, sin_T1F)
        return _turned(heads_TND, cos_T1F, sin_T1F)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_TND: Tensor) -> tuple[Tensor, None, None]:
        cos_T1F, sin_T1F = ctx.saved_tensors
        return _turned(grad_TND, cos_T1F, -sin_T1F), None, None


def _turned(heads_TND: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    turned_TND = torch.empty_like(heads_TND)
    first_TNF, second_TNF = heads_TND.chunk(2, dim=-1)
    first_turned_TNF, second_turned_TNF = turned_TND.chunk(2, dim=-1)
    torch.mul(first_TNF, cos_T1F, out=first_turned_TNF).addcmul_(second_TNF, sin_T1F, value=-1)
    torch.mul(second_TNF, cos_T1F, out=second_turned_TNF).addcmul_(first_TNF, sin_T1F)
    return turned_TND


def read_rope(keys: Keys, max_position_embeddings: int) -> tuple[float, Llama3Scaling | None]:
    """The base and the scaling that a config.json asks for, as `rope_parameters` or `rope_theta`/`rope_scaling`."""
    if keys.values.get("rope_parameters") and keys.values.get("rope_scaling"):
        raise keys.error("rope_scaling", "stands beside rope_parameters, and only one can count: take one of them out")
    name = "rope_parameters" if keys.values.get("rope_parameters") else "rope_scaling"
    parameters = keys.values.get(name) or {}
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        raise keys.error(name, "must be one table of numbers; a rotation per layer type is not supported")
    inner = Keys({"original_max_position_embeddings": max_position_embeddings} | parameters, f"{keys.source}: {name}")
    theta = inner.number("rope_theta", keys.number("rope_theta", 10_000.0))
    for owner in (keys, inner):
        if owner.number("partial_rotary_factor", 1.0) != 1.0:
            raise owner.error("partial_rotary_factor", "is not supported: RoPE turns whole heads")
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        raise ValueError(
            f"{keys.source}: {name}: rope_type = {rope_type!r} is not supported; supported: default, llama3"
        )
    scaling = Llama3Scaling(
        factor=inner.number("factor"),
        low_freq_factor=inner.number("low_freq_factor"),
        high_freq_factor=inner.number("high_freq_factor"),
        original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise inner.error("high_freq_factor", f"must be above low_freq_factor = {scaling.low_freq_factor}")
    return theta, scaling

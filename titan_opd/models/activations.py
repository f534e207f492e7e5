"""Keeping less for the backward pass: RMSNorm, SwiGLU, and inputs of projections that are made again.

Autograd keeps the operands of every operation. RMSNorm keeps its input and one number a token here instead of two
copies of the input, SwiGLU its two inputs instead of three tensors of that size; and what a projection reads, when one
elementwise pass over kept tensors makes it again, is not kept at all (`made_again`). The values are those of the plain
formulas.

Shape suffixes: H the normalised dimension, T tokens, I the feed-forward (intermediate) dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Placement


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467, equation 4).

    Attributes:
        weight_grad_placements: under tensor parallelism, where the weight is a whole DTensor on every rank, what a
            rank's gradient of it is: the same on all, or its part of a sum.
    """

    weight_grad_placements: tuple[Placement, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], in x's dtype; the mean is taken in float32 for narrower types."""
        weight_H = self.weight
        if isinstance(weight_H, DTensor):
            weight_H = weight_H.to_local(grad_placements=self.weight_grad_placements)
        if x.is_cuda:  # PyTorch's fused kernel keeps as little
            return F.rms_norm(x, self.normalized_shape, weight_H, self.eps)
        if not torch.is_grad_enabled():  # a step of generation is many small calls: none more than are needed
            return _rms_norm(x, weight_H, self.eps)[0]
        return _RMSNorm.apply(x, weight_H, self.eps)


def _rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised rows, and 1 / sqrt(mean(x^2) + eps) of each."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight_H).to(x.dtype), scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        normed, scale = _rms_norm(x, weight_H, eps)
        ctx.save_for_backward(x, weight_H, scale)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_H, scale = ctx.saved_tensors
        normalised = x.to(scale.dtype) * scale
        grad = grad.to(scale.dtype)
        # Not einsum("th,th->h"), which on the CPU is a product of a row and a column for every h.
        grad_weight_H = (grad * normalised).flatten(0, -2).sum(0)
        grad_normalised = grad * weight_H
        along_x = torch.linalg.vecdot(grad_normalised, normalised).div_(x.shape[-1]).unsqueeze_(-1)
        grad_x = grad_normalised.sub_(normalised.mul_(along_x)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight_H.to(weight_H.dtype), None


def swiglu(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202, equation 6), [T, I]."""
    return _SwiGLU.apply(gate_TI, up_TI) if torch.is_grad_enabled() else F.silu(gate_TI).mul_(up_TI)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gate_TI: Tensor, up_TI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TI, up_TI)
        return F.silu(gate_TI).mul_(up_TI)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_TI: Tensor) -> tuple[Tensor, Tensor]:
        gate_TI, up_TI = ctx.saved_tensors
        grad_up_TI = F.silu(gate_TI).mul_(grad_TI)
        return torch.ops.aten.silu_backward(grad_TI * up_TI, gate_TI), grad_up_TI


@contextmanager
def made_again(tensor: Tensor, make: Callable[[], Tensor]) -> Iterator[None]:
    """Operations in the block that would keep `tensor` for the backward pass let it go; there `make` makes it again.

    Args:
        tensor: what the block's operations read.
        make: computes the same values from tensors that are kept anyway; called without autograd, once for all the
            operations that kept `tensor`.
    """
    if not torch.is_grad_enabled():
        yield
        return
    recipe = _Recipe(make)
    address, shape = tensor.data_ptr(), tensor.shape

    def pack(kept: Tensor) -> Tensor | _Recipe:
        if kept.data_ptr() != address or kept.shape != shape:
            return kept
        recipe.num_waiting += 1
        return recipe

    def unpack(kept: Tensor | _Recipe) -> Tensor:
        return kept.take() if isinstance(kept, _Recipe) else kept

    with saved_tensors_hooks(pack, unpack):
        yield


class _Recipe:
    """Makes a tensor when the first operation asks, and holds it until the last has asked."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.num_waiting = 0
        self._make = make
        self._made: Tensor | None = None

    @torch.no_grad()
    def take(self) -> Tensor:
        made = self._make() if self._made is None else self._made
        self.num_waiting -= 1
        self._made = made if self.num_waiting > 0 else None
        return made

"""RMSNorm and SwiGLU that keep little for the backward pass.

Autograd keeps the operands of every elementwise operation; of the layers' parts these two keep the most. Here RMSNorm
keeps its input and one number a token instead of two copies of the input, and SwiGLU keeps its two inputs instead of
three tensors of that size. The values are those of the plain formulas.

Shape suffixes: T tokens, H the normalised dimension, I the feed-forward (intermediate) dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467, equation 4)."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], in x's dtype; the mean is taken in float32 for narrower types."""
        if x.is_cuda:  # PyTorch's fused kernel keeps as little
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        wide = x.to(_wide(x.dtype))
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_H, scale)
        return (wide * scale).mul_(weight_H).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_H, scale = ctx.saved_tensors
        normalised = x.to(scale.dtype) * scale
        grad = grad.to(scale.dtype)
        grad_weight_H = torch.einsum("th,th->h", grad.flatten(0, -2), normalised.flatten(0, -2))
        grad_normalised = grad * weight_H
        along_x = torch.linalg.vecdot(grad_normalised, normalised).div_(x.shape[-1]).unsqueeze_(-1)
        grad_x = grad_normalised.sub_(normalised.mul_(along_x)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight_H.to(weight_H.dtype), None


def swiglu(gate_TI: Tensor, up_TI: Tensor) -> Tensor:
    """silu(gate) * up (arXiv 2002.05202, equation 6), [T, I]."""
    return _SwiGLU.apply(gate_TI, up_TI)


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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)

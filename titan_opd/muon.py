"""Muon: the momentum of a matrix, orthogonalised, is its update (Jordan et al. 2024, "Muon").

Every process that holds a shard takes part: whole matrices are needed, so each is gathered, orthogonalised by one
process in turn, and sent back to all, which keep their shards. What is no matrix of a layer has AdamW.

Shape suffixes: R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_opd.parallel import own_part, whole_tensor

# Of the quintic a x + b x^3 + c x^5 that brings singular values towards 1, and how often it is applied.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7


class MuonWithAdamW(torch.optim.AdamW):
    """AdamW, but for groups with `muon: True`, whose parameters are matrices and which are updated by

        m <- momentum m + g
        W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(R, C)) orthogonalize(g + momentum m)

    The factor gives updates the size of AdamW's, so that both share a learning rate and a decay (arXiv 2502.16982,
    equation 4).

    Args:
        groups: parameter groups; one with `muon: True` has a `momentum`, too.
        dtype: of the products of the orthogonalisation.
        options: AdamW's.
    """

    def __init__(self, groups: list[dict[str, Any]], *, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(groups, **options)
        self._dtype = dtype

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        return False if group.get("muon") else super()._init_group(group, *lists)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = super().step(closure)
        for group in self.param_groups:
            if group.get("muon"):
                self._step_matrices(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
        num_processes = dist.get_world_size() if dist.is_initialized() else 1
        for first in range(0, len(matrices), num_processes):  # whole matrices are held for one round only
            turn = matrices[first : first + num_processes]
            updates = self._orthogonalized([self._direction(matrix, group["momentum"]) for matrix in turn])
            for matrix, update_RC in zip(turn, updates, strict=True):
                rate = float(group["lr"])
                local = matrix.to_local() if isinstance(matrix, DTensor) else matrix
                local.mul_(1 - rate * group["weight_decay"])
                local.add_(update_RC[own_part(matrix)], alpha=-rate * 0.2 * math.sqrt(max(matrix.shape)))

    def _direction(self, matrix: Tensor, momentum: float) -> Tensor:
        state = self.state[matrix]
        if not state:
            state["step"] = torch.zeros(())  # AdamW reads every parameter's when a state is loaded
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        state["step"] += 1
        state["momentum_buffer"].mul_(momentum).add_(matrix.grad)
        return matrix.grad.add(state["momentum_buffer"], alpha=momentum)

    def _orthogonalized(self, directions: list[Tensor]) -> list[Tensor]:
        """[R, C] whole, of at most as many directions as there are processes: process i makes the i-th."""
        wholes = [whole_tensor(direction).to(self._dtype) for direction in directions]
        if not dist.is_initialized():
            return [orthogonalize(whole_RC) for whole_RC in wholes]
        rank = dist.get_rank()
        results = [orthogonalize(whole) if i == rank else torch.empty_like(whole) for i, whole in enumerate(wholes)]
        for i, result in enumerate(results):
            dist.broadcast(result, src=i)
        return results


def orthogonalize(matrix_RC: Tensor) -> Tensor:
    """About U V^T of the matrix's singular value decomposition: singular values between 0.7 and 1.2 (Newton-Schulz)."""
    if matrix_RC.shape[0] > matrix_RC.shape[1]:
        return orthogonalize(matrix_RC.T).T.contiguous()
    a, b, c = _COEFFICIENTS
    x_RC = matrix_RC / matrix_RC.norm().clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram_RR = x_RC @ x_RC.T
        x_RC = a * x_RC + (b * gram_RR + c * gram_RR @ gram_RR) @ x_RC
    return x_RC.contiguous()

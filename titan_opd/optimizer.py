"""AdamW with warm-up, decay and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from titan_opd.config.schema import OptimizerConfig


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW; matrices decay, vectors (norms, biases) do not."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """The learning rate of optimizer step `step` (from 0) of `num_steps`.

    It rises linearly over the first `warmup_steps` steps, reaching the peak at step `warmup_steps`, and then falls to
    `final_fraction` of the peak at the last step.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    progress = (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps)
    remaining = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.decay]
    floor = config.final_fraction if config.decay != "constant" else 1.0
    return config.learning_rate * (floor + (1.0 - floor) * remaining)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their global 2-norm is at most `max_norm` (0: leave them); the norm before."""
    return nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else math.inf)

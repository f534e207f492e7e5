"""AdamW, with moments of 32 or 8 bits, or Muon, with warm-up, decay and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from titan_opd.config.schema import OptimizerConfig
from titan_opd.muon import MuonWithAdamW
from titan_opd.torchao_setup import import_torchao


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Fused AdamW, torchao's AdamW with moments of 8 bits, or Muon for the matrices within layers.

    Matrices decay, vectors (norms, biases) do not.

    Raises:
        ValueError: torchao is asked for and missing.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    matrices = {name: parameter for name, parameter in trained.items() if parameter.ndim >= 2}
    groups = [
        {"params": list(matrices.values()), "weight_decay": config.weight_decay},
        {"params": [p for p in trained.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    options = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps}
    if config.name == "adamw_8bit":
        return import_torchao("torchao.optim", "optimizer.name = 'adamw_8bit'").AdamW8bit(groups, **options)
    options["fused"] = True
    if config.name == "adamw":
        return torch.optim.AdamW(groups, **options)
    # Muon's authors leave the vocabulary's matrices to AdamW: their rows belong to single tokens.
    is_layer = {name: not name.endswith(("embed_tokens.weight", "lm_head.weight")) for name in matrices}
    muon = {"muon": True, "momentum": config.momentum, "weight_decay": config.weight_decay}
    groups[0]["params"] = [parameter for name, parameter in matrices.items() if not is_layer[name]]
    groups.append(muon | {"params": [parameter for name, parameter in matrices.items() if is_layer[name]]})
    return MuonWithAdamW(groups, dtype=getattr(torch, config.muon_dtype), **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Of the steps that follow."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # compiled steps read it from there; a new number would compile anew
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


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

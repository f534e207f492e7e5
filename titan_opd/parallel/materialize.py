"""Weights for a model that was spread over the processes before it had any: each process reads what it holds.

No process ever holds the whole model, nor, reading a checkpoint, one whole tensor.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_opd.models import Decoder, read_weights


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give the parameters of `model`, on the meta device, storage on `device`: this process's shards only."""
    model.to_empty(device=device)


@torch.no_grad()
def load_shards(decoder: Decoder, path: str | Path) -> None:
    """Copy this process's shards of the weights in the folder `path` into `decoder`, cast to its dtype.

    Names and shapes are checked before anything is written.

    Raises:
        ValueError: the folder is missing, incomplete or damaged, or does not fit the decoder.
    """
    parameters = dict(decoder.named_parameters())
    for name, part in read_weights(path, decoder.config, part=lambda name: own_part(parameters[name])):
        _storage(parameters[name]).copy_(part)


@torch.no_grad()
def init_shards(decoder: Decoder, generator: torch.Generator) -> None:
    """Draw the weights as `Decoder.init_weights` does on one process: whole tensors, of which each keeps its shard.

    Args:
        generator: on the CPU, the same on all processes.
    """
    parameters = dict(decoder.named_parameters())
    for name, whole in decoder.initial_weights(generator):
        _storage(parameters[name]).copy_(whole[own_part(parameters[name])])


def own_part(parameter: Tensor) -> tuple[slice, ...]:
    """Where this process's shard lies in the whole parameter."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))


def _storage(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter

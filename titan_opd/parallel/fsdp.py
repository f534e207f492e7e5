"""Sharding the student's parameters, gradients and optimizer state over the processes (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from titan_opd.models import Decoder, apply_activation_checkpointing
from titan_opd.parallel.world import World


def parallelize(
    model: nn.Module,
    decoder: Decoder,
    world: World,
    *,
    compute_dtype: torch.dtype,
    recompute_activations: bool,
    forward_methods: Sequence[str] = (),
) -> None:
    """Make `model`, in place, one whose parameters are sharded over `world`.

    Args:
        model: the decoder with its loss on top; its forward and `forward_methods` must be the only ways into the
            decoder, because they gather the embedding, the final norm and the output projection.
        decoder: the decoder in `model`, float32.
        world: the processes.
        compute_dtype: of the layers' products and activations; masters, gradients and reductions are float32.
        recompute_activations: keep only each layer's input for the backward pass.
        forward_methods: names of the other methods of `model` that compute with the decoder.
    """
    if recompute_activations:
        apply_activation_checkpointing(decoder)
    layer_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    *layers, last_layer = decoder.model.layers
    for group in (*layers, [last_layer, decoder.model.norm]):
        fully_shard(group, mesh=world.mesh, mp_policy=layer_policy)
    # The embedding and the output projection stay float32: autograd casts a gradient to its parameter's type, and the
    # loss head's float32 gradient of the vocabulary matrix must reach the reduction as it is. The head casts it.
    fully_shard(model, mesh=world.mesh, mp_policy=MixedPrecisionPolicy())
    for name in forward_methods:
        register_fsdp_forward_method(model, name)
    for module in fsdp_modules(model):
        # One rule for the loss's scale: it is divided by the trained tokens of all processes, so gradients are summed.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def reshard(model: nn.Module) -> None:
    """Free gathered parameters after a forward pass that no backward pass follows."""
    for module in fsdp_modules(model):
        module.reshard()


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The parts of `model` that gather and shard their own parameters."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def whole_tensor(parameter: Tensor) -> Tensor:
    """A parameter with all its shards, on every process; all processes must ask for the same one."""
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

"""Sharding the student's parameters, gradients and optimizer state over the processes (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from titan_opd.config.schema import ParallelConfig
from titan_opd.models import Decoder


def apply_fsdp(
    model: nn.Module,
    decoder: Decoder,
    mesh: DeviceMesh,
    config: ParallelConfig,
    *,
    compute_dtype: torch.dtype,
    forward_methods: Sequence[str] = (),
) -> None:
    """Shard the parameters of `model`, in place, over `mesh`: a layer is a group, and so is all that is in none.

    Args:
        model: the decoder with its loss on top; its forward and `forward_methods` must be the only ways into the
            decoder, because they gather the embedding and the output projection.
        decoder: the decoder in `model`, float32.
        mesh: [dp_shard], or [dp_replicate, dp_shard] for several copies.
        config: when to gather and to free, and where shards live.
        compute_dtype: of the layers' products and activations; masters, gradients and reductions are float32.
        forward_methods: names of the other methods of `model` that compute with the decoder.
    """
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.cpu_offload else OffloadPolicy()
    options = {"mesh": mesh, "reshard_after_forward": config.reshard_after_forward, "offload_policy": offload}
    layer_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    layers = list(decoder.model.layers)
    for group in (*layers[:-1], [layers[-1], decoder.model.norm]):
        fully_shard(group, mp_policy=layer_policy, **options)
    # The embedding and the output projection stay float32: autograd casts a gradient to its parameter's type, and the
    # loss head's float32 gradient of the vocabulary matrix must reach the reduction as it is. The head casts it. They
    # are not freed between forward and backward: the last thing that forward reads is the first that backward does.
    fully_shard(model, mp_policy=MixedPrecisionPolicy(), **options | {"reshard_after_forward": False})
    for name in forward_methods:
        register_fsdp_forward_method(model, name)
    for module in fsdp_modules(model):
        # One rule for the loss's scale: it is divided by the trained tokens of all processes, so gradients are summed.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    if config.prefetch:
        _prefetch(layers, config.prefetch)


def _prefetch(layers: Sequence[FSDPModule], depth: int) -> None:
    """Gather the parameters of the next `depth` layers while one computes, forwards and backwards."""
    for index, layer in enumerate(layers):
        following, preceding = layers[index + 1 : index + 1 + depth], layers[max(0, index - depth) : index]
        layer.set_modules_to_forward_prefetch(following)
        layer.set_modules_to_backward_prefetch(preceding[::-1])


def begin_micro_batch(model: nn.Module, config: ParallelConfig, *, is_last: bool) -> None:
    """Say what the next backward pass leaves undone because another micro-batch of the same step follows.

    Gradients cross the processes after the last one (`reduce_gradients = "last"`), or are reduced to shards after each
    and cross the copies of the student after the last ("each"). Parameters that stay gathered after a forward pass
    stay so until the step's last backward pass.
    """
    if not isinstance(model, FSDPModule):
        return
    if config.reduce_gradients == "last":
        model.set_requires_gradient_sync(is_last)
    else:
        model.set_requires_all_reduce(is_last)
    if not config.reshard_after_forward:
        model.set_reshard_after_backward(is_last)


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

"""Everything that is done to a model before it trains, in the one order in which the parts fit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_opd.config.schema import ParallelConfig, TrainingConfig
from titan_opd.models import Decoder
from titan_opd.parallel.checkpointing import apply_activation_checkpointing
from titan_opd.parallel.float8 import apply_float8
from titan_opd.parallel.fsdp import apply_fsdp
from titan_opd.parallel.mesh import fsdp_mesh
from titan_opd.parallel.tensor_parallel import apply_tensor_parallel


def parallelize(
    model: nn.Module,
    decoder: Decoder,
    mesh: DeviceMesh,
    training: TrainingConfig,
    parallel: ParallelConfig | None = None,
    *,
    forward_methods: Sequence[str] = (),
) -> None:
    """Spread `model`, in place, over the processes of `mesh`.

    A model on the meta device stays there, without storage: `materialize` gives each process its shards. One that has
    its weights already must have the same on all processes.

    Args:
        model: the decoder with its loss on top.
        decoder: the decoder in `model`, float32.
        mesh: [dp_replicate, dp_shard, tp].
        training: what is computed again, whether layers are compiled, and the types they compute in.
        parallel: how the axes are used; None: as by default.
        forward_methods: names of the methods of `model`, beside its forward, that compute with the decoder.

    Raises:
        ValueError: heads or feed-forward units cannot be shared by the tp axis; float8 cannot be had.
    """
    parallel = parallel or ParallelConfig()
    # 0. Float8 exchanges modules, which everything below hooks into; their parameters stay.
    if training.float8.recipe != "none":
        apply_float8(decoder, training.float8, tp=mesh["tp"].size(), device_type=mesh.device_type)
    # 1. Tensor parallel: it replaces parameters, by which everything below finds them.
    if mesh["tp"].size() > 1:
        apply_tensor_parallel(decoder, mesh["tp"], sequence_parallel=parallel.sequence_parallel)
    # 2. Activation checkpointing around what a layer computes, the collectives of 1 included and those of 4 not: a
    #    layer's parameters are gathered once for its second computation and its backward pass.
    apply_activation_checkpointing(decoder, training.recompute_activations)
    # 3. Compiled layer by layer: one graph serves all of them, and the hooks of 2 and 4 stay outside. (A layer
    #    compiled with 2 inside would silently not be compiled: attention interrupts its graph, and 2 allows no break.)
    if training.compile:
        for layer in decoder.model.layers:
            layer.compute = torch.compile(layer.compute, dynamic=True)
    # 4. FSDP last: it shards what tensor parallelism left to each rank, and its hooks are the outermost.
    apply_fsdp(
        model,
        decoder,
        fsdp_mesh(mesh),
        parallel,
        compute_dtype=getattr(torch, training.compute_dtype),
        forward_methods=forward_methods,
    )

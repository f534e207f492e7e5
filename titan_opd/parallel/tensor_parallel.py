"""Tensor and sequence parallelism: which matrix is cut along which dimension, in PyTorch's public styles.

Within a layer (arXiv 1909.08053): the projections into heads and feed-forward units are cut by columns, those back into
the residual stream by rows, so that a rank computes whole heads and units and two sums a layer cross the ranks. With
sequence parallelism (arXiv 2205.05198) each sum is scattered over the tokens instead of handed to all ranks, and
gathered again before the next projection: the same traffic, while norms and residuals are of T / tp tokens a rank.

The vocabulary is cut by rows, in the embedding and in the output projection, whose loss needs no logits of other ranks
(titan_opd/losses/vocab_parallel.py).

Shape suffixes: T packed tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import logging

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from titan_opd.models import Decoder, DecoderConfig


def apply_tensor_parallel(decoder: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cut the matrices of `decoder`, in place, over the axis `mesh`; every rank must hold the same whole weights.

    Raises:
        ValueError: heads or feed-forward units cannot be shared equally.
    """
    check_divisible(decoder.config, mesh.size())
    # It warns that a matrix cut along one dimension by both tp and FSDP is gathered in two steps, as it must be.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    styles = plan(decoder.config, sequence_parallel=sequence_parallel)
    parallelize_module(decoder, mesh, styles, src_data_rank=None)  # nothing is sent: each rank cuts its own copy
    # The embedding's sum is still under way when it is returned, and no gradient comes back to it from a compiled layer
    # that reads it so (torch 2.13). Its copy is a plain tensor.
    decoder.model.embed_tokens.register_forward_hook(lambda _module, _inputs, output: output.clone())


def check_divisible(config: DecoderConfig, tp: int, *, whose: str = "student") -> None:
    """Raise a ValueError when a rank of `tp` would not have whole heads, or others more units than it."""
    for what, count in (
        ("num_attention_heads", config.num_heads),
        ("num_key_value_heads", config.num_kv_heads),
        ("intermediate_size", config.intermediate_size),
    ):
        if count % tp:
            counts = (config.num_heads, config.num_kv_heads, config.intermediate_size)
            possible = [n for n in range(1, min(counts) + 1) if not any(one % n for one in counts)]
            raise ValueError(
                f"parallel.tp = {tp} does not divide the {whose}'s {what} = {count}; possible: "
                f"{', '.join(map(str, possible))}"
            )


def plan(config: DecoderConfig, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """The style of each module, by name."""
    stream = Shard(0) if sequence_parallel else Replicate()  # of the residual stream [T, H]
    layer: dict[str, ParallelStyle] = {
        # One tensor for all projections that read it: their gradients are summed on the rank, then once over the ranks.
        "self_attn": _whole_input(stream, num_others=3),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=stream),
        "mlp": _whole_input(stream, num_others=0),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=stream),
        "input_layernorm": WholeNorm(own_rows=sequence_parallel),
        "post_attention_layernorm": WholeNorm(own_rows=sequence_parallel),
    }
    if config.qk_norm:  # of heads, and a rank has its own
        layer |= {"self_attn.q_norm": WholeNorm(own_rows=True), "self_attn.k_norm": WholeNorm(own_rows=True)}
    styles = {f"model.layers.*.{name}": style for name, style in layer.items()}
    styles["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    styles["model.norm"] = WholeNorm(own_rows=sequence_parallel)
    if sequence_parallel:
        styles["model"] = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    if not config.tie_word_embeddings:
        styles["lm_head"] = ColwiseParallel()
    return styles


def _whole_input(stream: Shard | Replicate, *, num_others: int) -> PrepareModuleInput:
    """All tokens for a module whose first input is the residual stream; `num_others` inputs stay as they are."""
    others = (None,) * num_others
    return PrepareModuleInput(
        input_layouts=(stream, *others), desired_input_layouts=(Replicate(), *others), use_local_output=False
    )


class WholeNorm(ParallelStyle):
    """A norm whose weight every rank holds whole.

    Args:
        own_rows: each rank normalises other tokens or heads, so the weight's gradient is the sum of the ranks'; False:
            all normalise the same, and have the same gradient.
    """

    def __init__(self, *, own_rows: bool) -> None:
        super().__init__()
        self.own_rows = own_rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight_H = DTensor.from_local(module.weight.detach(), device_mesh, [Replicate()], run_check=False)
        module.register_parameter("weight", nn.Parameter(weight_H, requires_grad=module.weight.requires_grad))
        module.weight_grad_placements = (Partial() if self.own_rows else Replicate(),)
        return module


def own_rows(weight_VH: Tensor) -> tuple[Tensor, dist.ProcessGroup | None]:
    """This rank's rows of a vocabulary matrix, differentiable, and the ranks that have the others; None: it has all."""
    if not isinstance(weight_VH, DTensor):
        return weight_VH, None
    return weight_VH.to_local(), weight_VH.device_mesh.get_group()

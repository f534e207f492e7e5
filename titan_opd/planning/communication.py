"""What crosses the processes in an optimizer step: calls and bytes by axis and collective.

Bytes are those of the whole tensor, what a gather makes and what a reduction reads. Over the wire of a process go, by a
ring among n, (n - 1) / n of them for a gather or a scattered reduction, and twice that for a sum that all get. The few
numbers of metrics and of the gradient's norm are left out.

Shape letters: T packed tokens of a micro-batch, N trained ones, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from titan_opd.config.schema import OptimizerConfig, ParallelConfig, TrainingConfig
from titan_opd.losses.chunks import rows_per_chunk
from titan_opd.models import DecoderConfig
from titan_opd.planning.activations import FLOAT32, ITEMSIZE, Workload
from titan_opd.planning.parts import Grid, Parts, divide

INT64 = 8  # bytes
_ROW_STATISTICS = 4  # numbers of a row of logits that each rank of tp hands to the others: two maxima, two sums


@dataclass(frozen=True)
class Traffic:
    """One kind of collective in a step.

    Attributes:
        what: is sent.
        axis: of the mesh, or "all" for all processes.
        collective: "all_gather", "reduce_scatter", "all_reduce" or "broadcast".
        calls: a step.
        num_bytes: of the whole tensors of all calls.
        num_processes: that take part.
    """

    what: str
    axis: str
    collective: str
    calls: int
    num_bytes: int
    num_processes: int

    @property
    def wire_bytes(self) -> float:
        """That a process sends."""
        once = self.num_bytes * (self.num_processes - 1) / self.num_processes
        return 2 * once if self.collective == "all_reduce" else once


def step_traffic(
    config: DecoderConfig,
    work: Workload,
    grid: Grid,
    *,
    training: TrainingConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    numbers: int,
    dense: bool = False,
) -> list[Traffic]:
    """What crosses the processes in a step; nothing where a process is alone.

    Args:
        numbers: of a row that the loss sums over the ranks of tp: its candidates' logits (K), or for an objective over
            the whole vocabulary the sums of `dense_pair_sums`.
        dense: whether the objective is over the whole vocabulary, which needs the statistics of the teacher's logits.
        The others as in `StepMemory`.
    """
    parts = divide(config, grid)
    traffic = [
        *_parameter_traffic(parts, work, grid, training, parallel),
        *_activation_traffic(config, work, grid, training),
        *_norm_traffic(parts, grid),
        *_head_traffic(config, work, grid, training, numbers, dense=dense),
        *_muon_traffic(parts, grid, optimizer),
    ]
    return [one for one in traffic if one.num_processes > 1]


def _parameter_traffic(
    parts: Parts, work: Workload, grid: Grid, training: TrainingConfig, parallel: ParallelConfig
) -> Iterator[Traffic]:
    itemsize, micro = ITEMSIZE[training.compute_dtype], work.num_microbatches
    # Layers are gathered forwards and again backwards; the root once, because it is not freed in between.
    layer_gathers, root_gathers = (2 * micro, micro) if parallel.reshard_after_forward else (1, 1)
    layers = sum(group.padded for group in parts.layers)
    num_bytes = grid.shard * (layer_gathers * itemsize * layers + root_gathers * FLOAT32 * parts.root.padded)
    calls = layer_gathers * len(parts.layers) + root_gathers
    yield Traffic("parameters", "dp_shard", "all_gather", calls, num_bytes, grid.shard)

    reductions = micro if parallel.reduce_gradients == "each" else 1
    padded = layers + parts.root.padded
    num_groups = len(parts.groups)
    num_bytes = reductions * FLOAT32 * padded * grid.shard
    yield Traffic("gradients", "dp_shard", "reduce_scatter", reductions * num_groups, num_bytes, grid.shard)
    yield Traffic("gradients", "dp_replicate", "all_reduce", num_groups, FLOAT32 * padded, grid.replicate)


def _activation_traffic(
    config: DecoderConfig, work: Workload, grid: Grid, training: TrainingConfig
) -> Iterator[Traffic]:
    """Of the residual stream [T, H] over tp: two sums a layer forwards, and two backwards, each of which sequence
    parallelism makes a gather and a scattered sum; the embedding's in float32."""
    layers = config.num_layers * work.num_microbatches
    tokens = work.num_tokens + -work.num_tokens % grid.tp  # padded
    stream = tokens * config.hidden_size
    itemsize = ITEMSIZE[training.compute_dtype]
    # Computed again, a layer's sums are repeated but for the last, whose result the backward pass does not need.
    again = 1 if training.recompute_activations == "full" else 0
    micro = work.num_microbatches
    if not grid.sequence_parallel:
        calls = (4 + again) * layers
        num_bytes = stream * (calls * itemsize + micro * FLOAT32)
        yield Traffic("residual stream", "tp", "all_reduce", calls + micro, num_bytes, grid.tp)
        return
    gathers = (4 + 2 * again) * layers + micro  # the result of the last layer, whole for the loss
    num_bytes = stream * (gathers * itemsize + micro * FLOAT32)  # and the embedding's gradient
    yield Traffic("residual stream", "tp", "all_gather", gathers + micro, num_bytes, grid.tp)
    scatters = (4 + again) * layers
    num_bytes = stream * (scatters * itemsize + micro * FLOAT32)
    yield Traffic("residual stream", "tp", "reduce_scatter", scatters + micro, num_bytes, grid.tp)


def _norm_traffic(parts: Parts, grid: Grid) -> Iterator[Traffic]:
    """Of the gradients of norms whose ranks see other tokens or heads, once a step, before FSDP reduces them."""
    norms = [
        part
        for part in parts.all
        if part.name.endswith(("q_norm.weight", "k_norm.weight"))
        or (grid.sequence_parallel and part.name.endswith("norm.weight"))
    ]
    num_bytes = FLOAT32 * sum(part.held for part in norms)
    yield Traffic("gradients of norms", "tp", "all_reduce", len(norms), num_bytes, grid.tp)


def _head_traffic(
    config: DecoderConfig, work: Workload, grid: Grid, training: TrainingConfig, numbers: int, *, dense: bool
) -> Iterator[Traffic]:
    rows, micro = work.num_rows, work.num_microbatches
    vocabulary = -(-config.vocab_size // grid.tp)
    sides = 2 if dense else 1  # the student's logits, and the teacher's, taken to be as wide
    row_bytes = sides * vocabulary * ITEMSIZE[training.compute_dtype]
    chunks = math.ceil(rows / rows_per_chunk(rows, row_bytes, training.logits_chunk_mb))
    # Each rank's number of vocabulary rows, once; then the statistics of all ranks, chunk by chunk.
    num_bytes = sides * grid.tp * (INT64 + _ROW_STATISTICS * FLOAT32 * rows)
    yield Traffic("statistics of logits", "tp", "all_gather", micro * sides * (1 + chunks), micro * num_bytes, grid.tp)
    num_bytes = FLOAT32 * rows * numbers
    yield Traffic("sums of the loss", "tp", "all_reduce", micro * chunks, micro * num_bytes, grid.tp)
    num_bytes = FLOAT32 * rows * config.hidden_size
    yield Traffic("gradient of hidden states", "tp", "all_reduce", micro, micro * num_bytes, grid.tp)


def _muon_traffic(parts: Parts, grid: Grid, optimizer: OptimizerConfig) -> Iterator[Traffic]:
    if optimizer.name != "muon":
        return
    matrices = [part for group in parts.layers for part in group.parts if len(part.shape) == 2]
    gathered, whole = sum(part.gathered for part in matrices), sum(math.prod(part.shape) for part in matrices)
    count = len(matrices)
    yield Traffic("Muon's momenta", "dp_shard", "all_gather", count, FLOAT32 * gathered, grid.shard)
    yield Traffic("Muon's momenta", "tp", "all_gather", count, FLOAT32 * whole, grid.tp)
    num_bytes = ITEMSIZE[optimizer.muon_dtype] * whole
    yield Traffic("Muon's updates", "all", "broadcast", count, num_bytes, grid.dp * grid.tp)

"""What autograd keeps of a decoder layer for its backward pass, tensor by tensor.

Counted from the operations of `models/decoder.py` as they are: an RMSNorm keeps its input and one number a row, the
rotation nothing but the cosines, attention its operands, its result and one number a row and head, a projection its
input. Sequences so short that attention pads them (`models/attention.py`, on the CPU) keep up to 7 rows more each,
which are not counted. Inputs of projections that are made again in the backward pass (`models/activations.py`) are not
kept; they are where PyTorch's tensor-parallel styles wrap them, and within a layer that is computed again as a whole.

Shape letters: T packed tokens, H hidden, N query heads, M key-value heads, D dimensions of a head, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_opd.models import DecoderConfig
from titan_opd.planning.parts import Grid

FLOAT32 = 4  # bytes
ITEMSIZE = {"float32": FLOAT32, "bfloat16": 2}


@dataclass(frozen=True)
class Workload:
    """What one process trains in an optimizer step.

    Attributes:
        num_tokens: packed tokens of a micro-batch.
        num_rows: trained tokens of a micro-batch.
        num_microbatches: of the step.
        separate_calls: whether attention is called for each sequence and its results are joined by a copy: on the CPU
            and in float32, when a micro-batch has sequences of several lengths.
    """

    num_tokens: int
    num_rows: int
    num_microbatches: int = 1
    separate_calls: bool = False


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer's tensors.

    Attributes:
        kept: from the forward pass to the backward pass.
        whole: kept while the layer's own backward pass runs: more than `kept` where it is computed again.
        temporary: the most that the layer's backward pass holds beside these.
    """

    kept: int
    whole: int
    temporary: int


def layer_memory(config: DecoderConfig, work: Workload, grid: Grid, *, itemsize: int, recompute: str) -> LayerMemory:
    """Of one layer.

    Args:
        config: of the decoder.
        work: the micro-batch.
        grid: the process's share of heads, units and, with sequence parallelism, of the residual stream's tokens.
        itemsize: bytes of a number in the type the layers compute in.
        recompute: `training.recompute_activations`.
    """
    made_again = recompute == "none" and grid.tp == 1
    tensors = kept_tensors(config, work, grid, itemsize=itemsize, made_again=made_again)
    units = work.num_tokens * config.intermediate_size // grid.tp * itemsize
    stream = work.num_tokens * config.hidden_size * itemsize
    # Of SwiGLU's backward pass: the product's gradient, silu(gate) times it (up's gradient), it times up, and gate's
    # gradient; beside them the gradient of the layer's output, which the residual sum passes on. The product itself is
    # gone: the down projection has read it.
    temporary = 4 * units + stream
    whole = sum(tensors.values()) - (0 if made_again else units)
    kept = {
        "none": sum(tensors.values()),
        "full": tensors["input"],
        "selective": tensors["input"] + tensors["attention"],
    }[recompute]
    return LayerMemory(kept + _casts(config, work, itemsize), whole, temporary)


def kept_tensors(
    config: DecoderConfig, work: Workload, grid: Grid, *, itemsize: int, made_again: bool
) -> dict[str, int]:
    """Bytes that one layer keeps when nothing of it is computed again, by what they are.

    Args:
        made_again: whether the inputs of projections are not kept but made again from what is.
    """
    num_tokens = work.num_tokens
    stream_tokens = -(-num_tokens // grid.tp) if grid.sequence_parallel else num_tokens
    stream = stream_tokens * config.hidden_size * itemsize
    scale = stream_tokens * FLOAT32  # of a norm: one number a row
    heads, kv_heads = num_tokens * config.num_heads // grid.tp, num_tokens * config.num_kv_heads // grid.tp
    queries, keys = (count * config.head_dim * itemsize for count in (heads, kv_heads))
    units = num_tokens * config.intermediate_size // grid.tp * itemsize
    inputs = num_tokens * config.hidden_size * itemsize
    return {
        "input": stream,
        "norms": 2 * scale,
        "heads before their norms": queries + keys + (heads + kv_heads) * FLOAT32 if config.qk_norm else 0,
        "query, key, value": queries + 2 * keys,
        "attention": queries + heads * FLOAT32,
        "joined attention": queries if work.separate_calls else 0,
        "after attention": stream,
        "gate, up": 2 * units,
        "inputs of projections": 0 if made_again else 2 * inputs + units,
    }


def _casts(config: DecoderConfig, work: Workload, itemsize: int) -> int:
    """Cosines and sines are made once in float32; FSDP casts them for each layer that computes in another type."""
    return 0 if itemsize == FLOAT32 else work.num_tokens * config.head_dim * itemsize

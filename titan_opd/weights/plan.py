"""Which part of each Hugging Face tensor goes where in an engine's own, fused and tensor-parallel, storage.

Engines fuse what has one input: queries, keys and values are one matrix, the two projections into the feed-forward
units are one. Under tensor parallelism each rank has whole heads and units (arXiv 1909.08053): rows of what leads into
them, columns of what leads out, and rows of the vocabulary. Pure: shapes and slices only.

For rank r of R:

    fused target                      from                              rows or columns of rank r
    self_attn.qkv_proj.weight, .bias  q_proj; k_proj; v_proj, stacked   heads r N/R ..; key-value heads r M/R .., or the
                                                                        one head r M // R where M < R (they are copied)
    mlp.gate_up_proj.weight           gate_proj; up_proj, stacked       units r I/R ..
    self_attn.o_proj.weight           same name                         columns: those of the heads
    mlp.down_proj.weight              same name                         columns: those of the units
    embed_tokens.weight, lm_head      same name                         rows r V'/R .., V' = V rounded up
    norms                             same name                         all

N query heads, M key-value heads, I intermediate size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_opd.models import Decoder, DecoderConfig
from titan_opd.weights.pieces import Piece, WeightSpec

VOCAB_MULTIPLE = 64  # engines round the vocabulary up to such a multiple times the number of ranks' own


@dataclass(frozen=True)
class Slot:
    """A place in an engine's storage.

    Attributes:
        target: the engine's parameter.
        first_row: of the target, where the part begins.
        rows: [begin, end) of the Hugging Face tensor's rows that go there.
        columns: [begin, end) of its columns; None: all, or it has none.
    """

    target: str
    first_row: int
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class Plan:
    """Where everything goes.

    Attributes:
        specs: of the Hugging Face tensors, by name: what a complete update consists of.
        slots: by Hugging Face name.
        shapes: of the engine's parameters.
    """

    specs: Mapping[str, WeightSpec]
    slots: Mapping[str, Slot]
    shapes: Mapping[str, tuple[int, ...]]

    def copies(self, pieces: Sequence[Piece], storage: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of (source, destination), all views, that put `pieces` into the engine's `storage`."""
        for piece in pieces:
            slot = self.slots[piece.name]
            begin = max(piece.first_row, slot.rows[0])
            end = min(piece.first_row + piece.tensor.shape[0], slot.rows[1])
            if begin >= end:
                continue  # another rank's
            source = piece.tensor[begin - piece.first_row : end - piece.first_row]
            if slot.columns is not None:
                source = source[:, slice(*slot.columns)]
            yield source, storage[slot.target].narrow(0, slot.first_row + begin - slot.rows[0], end - begin)

    def stored(self, name: str, storage: Mapping[str, Tensor]) -> Tensor:
        """This rank's part of a Hugging Face tensor, as a view of the engine's storage."""
        slot = self.slots[name]
        return storage[slot.target].narrow(0, slot.first_row, slot.rows[1] - slot.rows[0])

    def expected(self, name: str, whole: Tensor) -> Tensor:
        """What `stored` must equal when `whole` is the Hugging Face tensor."""
        slot = self.slots[name]
        rows = whole[slice(*slot.rows)]
        return rows if slot.columns is None else rows[:, slice(*slot.columns)]


def weight_specs(config: DecoderConfig, dtype: torch.dtype) -> dict[str, WeightSpec]:
    """Hugging Face names and shapes of a model's weights; a tied output projection is not among them."""
    with torch.device("meta"):
        decoder = Decoder(config)
    return {name: WeightSpec(tuple(value.shape), dtype) for name, value in decoder.named_parameters()}


def identity_plan(config: DecoderConfig, dtype: torch.dtype) -> Plan:
    """For an engine whose parameters are Hugging Face's own."""
    specs = weight_specs(config, dtype)
    slots = {name: Slot(name, 0, (0, spec.shape[0])) for name, spec in specs.items()}
    return Plan(specs, slots, {name: spec.shape for name, spec in specs.items()})


def fused_plan(config: DecoderConfig, dtype: torch.dtype, *, rank: int = 0, num_ranks: int = 1) -> Plan:
    """For rank `rank` of `num_ranks` of an engine with fused projections.

    Raises:
        ValueError: heads or units cannot be shared so that each rank has whole ones.
    """
    _check(config, rank, num_ranks)
    specs = weight_specs(config, dtype)
    slots: dict[str, Slot] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, spec in specs.items():
        module = name.split(".")[-2]
        slots[name] = _slot(config, name, module, spec.shape, rank, num_ranks)
        num_rows, columns = _target_rows(config, module, spec.shape, num_ranks), slots[name].columns
        width = spec.shape[1:] if columns is None else (columns[1] - columns[0],)
        shapes[slots[name].target] = (num_rows, *width)
    return Plan(specs, slots, shapes)


def _check(config: DecoderConfig, rank: int, num_ranks: int) -> None:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank {rank} of {num_ranks} ranks; ranks count from 0")
    if heads % num_ranks or config.intermediate_size % num_ranks or (kv_heads % num_ranks and num_ranks % kv_heads):
        raise ValueError(
            f"{num_ranks} ranks cannot share {heads} heads, {kv_heads} key-value heads and {config.intermediate_size} "
            "units so that each has whole ones; choose a divisor of them (or a multiple of the key-value heads)"
        )


def _heads(config: DecoderConfig, module: str, rank: int, num_ranks: int) -> tuple[int, int]:
    """[begin, end) of the rows of a projection's own heads."""
    count = config.num_heads if module == "q_proj" else config.num_kv_heads
    own = max(1, count // num_ranks)
    first = rank * count // num_ranks
    return first * config.head_dim, (first + own) * config.head_dim


def _slot(config: DecoderConfig, name: str, module: str, shape: tuple[int, ...], rank: int, num_ranks: int) -> Slot:
    share = config.intermediate_size // num_ranks
    if module in ("q_proj", "k_proj", "v_proj"):
        before = {"q_proj": (), "k_proj": ("q_proj",), "v_proj": ("q_proj", "k_proj")}[module]
        bounds = [_heads(config, one, rank, num_ranks) for one in before]
        first_row = sum(end - begin for begin, end in bounds)
        return Slot(name.replace(module, "qkv_proj"), first_row, _heads(config, module, rank, num_ranks))
    if module in ("gate_proj", "up_proj"):
        first_row = share if module == "up_proj" else 0
        return Slot(name.replace(module, "gate_up_proj"), first_row, (rank * share, (rank + 1) * share))
    if module == "o_proj":
        return Slot(name, 0, (0, shape[0]), _heads(config, "q_proj", rank, num_ranks))
    if module == "down_proj":
        return Slot(name, 0, (0, shape[0]), (rank * share, (rank + 1) * share))
    if module in ("embed_tokens", "lm_head"):
        padded = _vocabulary_rows(config, num_ranks)
        end = min(config.vocab_size, (rank + 1) * padded)
        return Slot(name, 0, (min(end, rank * padded), end))
    return Slot(name, 0, (0, shape[0]))


def _target_rows(config: DecoderConfig, module: str, shape: tuple[int, ...], num_ranks: int) -> int:
    if module in ("q_proj", "k_proj", "v_proj"):
        return sum(
            end - begin for begin, end in (_heads(config, m, 0, num_ranks) for m in ("q_proj", "k_proj", "v_proj"))
        )
    if module in ("gate_proj", "up_proj"):
        return 2 * config.intermediate_size // num_ranks
    if module in ("embed_tokens", "lm_head"):
        return _vocabulary_rows(config, num_ranks)
    return shape[0]


def _vocabulary_rows(config: DecoderConfig, num_ranks: int) -> int:
    """Of each rank, with padding."""
    padded = -(-config.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return -(-padded // num_ranks)

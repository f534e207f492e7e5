"""What a published version consists of: which tensors lie where in which bucket, and how they can be had."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from titan_opd.channel import ChannelError
from titan_opd.channel.tensors import DTYPES
from titan_opd.weights.pieces import Piece, WeightSpec

ALIGNMENT = 64  # bytes; each tensor of a bucket begins at a multiple

Count = Annotated[int, Meta(ge=0, lt=1 << 48)]


class TensorEntry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor.

    Attributes:
        bucket: it lies in this one.
        begin: byte of the bucket where it begins.
        digest: of its bytes (`verify.digest`).
    """

    name: Annotated[str, Meta(max_length=200)]
    shape: Annotated[list[Count], Meta(min_length=1, max_length=8)]
    bucket: Count
    begin: Count
    digest: int


class Probe(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Log-probabilities of a fixed text under the trainer's weights.

    Attributes:
        token_ids: [P + N], of which the first has no log-probability.
        logprobs: [P + N - 1], each token's given those before it.
        tolerance: largest mean absolute difference at an engine, in nats.
    """

    token_ids: list[Count]
    logprobs: list[float]
    tolerance: float


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """A published version.

    Attributes:
        version: the policy version.
        dtype: of all its tensors.
        tensors: in the order of their bytes.
        buckets: the size of each, bytes.
        offers: by the transports' names, what a receiver needs to know.
        machine: the trainer's (`shared_memory.machine_id`).
        probe: None where there is none.
    """

    version: Count
    dtype: str
    tensors: Annotated[list[TensorEntry], Meta(max_length=1_000_000)]
    buckets: Annotated[list[Count], Meta(max_length=1_000_000)]
    offers: dict[str, Any]
    machine: str
    probe: Probe | None = None

    @property
    def specs(self) -> dict[str, WeightSpec]:
        """What each tensor looks like."""
        return {entry.name: WeightSpec(tuple(entry.shape), DTYPES[self.dtype]) for entry in self.tensors}

    @property
    def digests(self) -> dict[str, int]:
        """Of each tensor's bytes."""
        return {entry.name: entry.digest for entry in self.tensors}

    def pieces(self, index: int, bucket: Tensor) -> list[Piece]:
        """The tensors of a bucket, as views of its bytes.

        Raises:
            ChannelError: it is not as long as it should be.
        """
        if bucket.numel() != self.buckets[index]:
            raise ChannelError(
                f"bucket {index} of version {self.version} has {bucket.numel()} bytes, {self.buckets[index]} were meant"
            )
        return [Piece(one.name, 0, view_of(bucket, one, self.dtype)) for one in self.tensors if one.bucket == index]

    def names(self, index: int) -> str:
        """What a bucket holds, for an error."""
        names = [one.name for one in self.tensors if one.bucket == index]
        return f"{names[0]!r} to {names[-1]!r}" if len(names) > 1 else repr(names[0])


def view_of(bucket: Tensor, entry: TensorEntry, dtype_name: str) -> Tensor:
    """A tensor in its bucket's bytes."""
    dtype = DTYPES[dtype_name]
    size = math.prod(entry.shape) * dtype.itemsize
    return bucket[entry.begin : entry.begin + size].view(dtype).view(entry.shape)


def lay_out(
    shapes: dict[str, torch.Size], dtype: torch.dtype, bucket_bytes: int
) -> tuple[list[TensorEntry], list[int]]:
    """Tensors end to end in buckets of at most `bucket_bytes`; a larger one has a bucket of its own.

    Returns:
        The tensors, their digests 0, and the buckets' sizes.
    """
    entries: list[TensorEntry] = []
    sizes: list[int] = []
    for name, shape in shapes.items():
        size = shape.numel() * dtype.itemsize
        begin = -(-sizes[-1] // ALIGNMENT) * ALIGNMENT if sizes else 0
        if not sizes or begin + size > bucket_bytes:
            sizes.append(0)
            begin = 0
        entries.append(TensorEntry(name, list(shape), len(sizes) - 1, begin, 0))
        sizes[-1] = begin + size
    return entries, sizes


@dataclass(frozen=True, eq=False)
class ManifestRecord:
    """A manifest as a payload.

    Attributes:
        text: [bytes] uint8, JSON.
    """

    text: Tensor

    @classmethod
    def of(cls, manifest: Manifest) -> ManifestRecord:
        return cls(torch.frombuffer(bytearray(msgspec.json.encode(manifest)), dtype=torch.uint8))

    def manifest(self) -> Manifest:
        """Read and checked.

        Raises:
            ChannelError: it is no manifest, or one that contradicts itself.
        """
        try:
            manifest = msgspec.json.decode(self.text.numpy().tobytes(), type=Manifest)
        except msgspec.DecodeError as error:
            raise ChannelError(f"no manifest of weights that can be read ({error})") from None
        itemsize = DTYPES[manifest.dtype].itemsize if manifest.dtype in DTYPES else 0
        for one in manifest.tensors:
            end = one.begin + math.prod(one.shape) * itemsize
            if not itemsize or one.bucket >= len(manifest.buckets) or end > manifest.buckets[one.bucket]:
                raise ChannelError(f"a manifest of weights in which {one.name!r} lies outside its bucket")
        if len({one.name for one in manifest.tensors}) < len(manifest.tensors):
            raise ChannelError("a manifest of weights that names a tensor twice")
        return manifest

"""What a published version consists of: which tensors lie where in which bucket, and how they can be had."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor

from titan_opd.channel import ChannelError
from titan_opd.channel.tensors import DTYPES
from titan_opd.weights.delta import Change, num_bytes_of, read_change
from titan_opd.weights.pieces import Piece, WeightSpec

ALIGNMENT = 64  # bytes; each tensor of a bucket begins at a multiple

Count = Annotated[int, Meta(ge=0, lt=1 << 48)]


class TensorEntry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor.

    Attributes:
        dtype: as in `titan_opd.channel.tensors.DTYPES`.
        bucket: it lies in this one.
        begin: byte of the bucket where it begins.
        digest: of its bytes (`verify.digest`).
    """

    name: Annotated[str, Meta(max_length=200)]
    dtype: str
    shape: Annotated[list[Count], Meta(min_length=1, max_length=8)]
    bucket: Count
    begin: Count
    digest: int

    @property
    def spec(self) -> WeightSpec:
        """What it looks like."""
        return WeightSpec(tuple(self.shape), DTYPES[self.dtype])


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


class DeltaEntry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor that changed since the version before.

    Attributes:
        num_changed: elements of it, at least 1.
        is_whole: all its bytes lie there, not only its changed elements.
        bucket: it lies in this one.
        begin: byte of the bucket where it begins.
    """

    name: Annotated[str, Meta(max_length=200)]
    num_changed: Annotated[int, Meta(ge=1, lt=1 << 48)]
    is_whole: bool
    bucket: Count
    begin: Count


class Delta(Struct, frozen=True, forbid_unknown_fields=True):
    """What turns the version before into this one.

    Attributes:
        base: the version before.
        base_digest: of all its tensors (`version_delta.digest_of_version`).
        first_bucket: of those in which the changes lie; the whole tensors lie in the ones before it.
        tensors: those that changed, in the order of their bytes; all others are those of the base.
    """

    base: Count
    base_digest: int
    first_bucket: Count
    tensors: Annotated[list[DeltaEntry], Meta(max_length=1_000_000)]


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """A published version.

    Attributes:
        version: the policy version.
        tensors: in the order of their bytes.
        buckets: the size of each, bytes; those with the whole tensors first.
        offers: by the transports' names, what a receiver needs to know.
        machine: the trainer's (`shared_memory.machine_id`).
        probe: None where there is none.
        delta: the same version as changes of another one; None where only whole tensors can be had.
    """

    version: Count
    tensors: Annotated[list[TensorEntry], Meta(max_length=1_000_000)]
    buckets: Annotated[list[Count], Meta(max_length=1_000_000)]
    offers: dict[str, Any]
    machine: str
    probe: Probe | None = None
    delta: Delta | None = None

    @property
    def specs(self) -> dict[str, WeightSpec]:
        """What each tensor looks like."""
        return {entry.name: entry.spec for entry in self.tensors}

    @property
    def digests(self) -> dict[str, int]:
        """Of each tensor's bytes."""
        return {entry.name: entry.digest for entry in self.tensors}

    @property
    def whole_buckets(self) -> range:
        """The numbers of those that hold the whole tensors."""
        return range(len(self.buckets) if self.delta is None else self.delta.first_bucket)

    @property
    def delta_buckets(self) -> range:
        """The numbers of those that hold the changes."""
        return range(len(self.whole_buckets), len(self.buckets))

    @property
    def unchanged(self) -> list[str]:
        """The tensors that are those of the delta's base."""
        changed = {one.name for one in self.delta.tensors} if self.delta is not None else set()
        return [one.name for one in self.tensors if one.name not in changed]

    def pieces(self, index: int, bucket: Tensor) -> list[Piece]:
        """The tensors of a bucket, as views of its bytes.

        Raises:
            ChannelError: it is not as long as it should be.
        """
        self._check_length(index, bucket)
        return [Piece(one.name, 0, view_of(bucket, one)) for one in self.tensors if one.bucket == index]

    def changes(self, index: int, bucket: Tensor) -> tuple[list[Piece], list[Change]]:
        """What a bucket of the delta holds: tensors that travel whole, and changed elements of others.

        Raises:
            ChannelError: it is not as long as it should be, or contradicts itself.
        """
        self._check_length(index, bucket)
        assert self.delta is not None
        specs = self.specs
        pieces, changes = [], []
        for one in self.delta.tensors:
            if one.bucket != index:
                continue
            spec = specs[one.name]
            memory = bucket[one.begin : one.begin + _delta_bytes(one, spec)]
            if one.is_whole:
                pieces.append(Piece(one.name, 0, memory.view(spec.dtype).view(spec.shape)))
            else:
                count = {"num_elements": spec.num_elements, "num_changed": one.num_changed}
                changes.append(read_change(one.name, memory, dtype=spec.dtype, **count))
        return pieces, changes

    def _check_length(self, index: int, bucket: Tensor) -> None:
        if bucket.numel() != self.buckets[index]:
            raise ChannelError(
                f"bucket {index} of version {self.version} has {bucket.numel()} bytes, {self.buckets[index]} were meant"
            )

    def names(self, index: int) -> str:
        """What a bucket holds, for an error."""
        entries = [*self.tensors, *(self.delta.tensors if self.delta is not None else ())]
        names = [one.name for one in entries if one.bucket == index]
        return f"{names[0]!r} to {names[-1]!r}" if len(names) > 1 else repr(names[0])


def view_of(bucket: Tensor, entry: TensorEntry) -> Tensor:
    """A tensor in its bucket's bytes."""
    spec = entry.spec
    return bucket[entry.begin : entry.begin + spec.num_bytes].view(spec.dtype).view(spec.shape)


def lay_out(specs: Mapping[str, WeightSpec], bucket_bytes: int) -> tuple[list[TensorEntry], list[int]]:
    """Tensors end to end in buckets of at most `bucket_bytes`; a larger one has a bucket of its own.

    Returns:
        The tensors, their digests 0, and the buckets' sizes.
    """
    places, sizes = place_end_to_end([spec.num_bytes for spec in specs.values()], bucket_bytes)
    entries = [
        TensorEntry(name, str(spec.dtype).removeprefix("torch."), list(spec.shape), bucket, begin, 0)
        for (name, spec), (bucket, begin) in zip(specs.items(), places, strict=True)
    ]
    return entries, sizes


def place_end_to_end(num_bytes: Iterable[int], bucket_bytes: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Places for things of `num_bytes` each in buckets of at most `bucket_bytes`; a larger one has a bucket of its own.

    Returns:
        The bucket and the first byte of each, and the buckets' sizes.
    """
    places: list[tuple[int, int]] = []
    sizes: list[int] = []
    for size in num_bytes:
        begin = -(-sizes[-1] // ALIGNMENT) * ALIGNMENT if sizes else 0
        if not sizes or begin + size > bucket_bytes:
            sizes.append(0)
            begin = 0
        places.append((len(sizes) - 1, begin))
        sizes[-1] = begin + size
    return places, sizes


def _delta_bytes(entry: DeltaEntry, spec: WeightSpec) -> int:
    return spec.num_bytes if entry.is_whole else num_bytes_of(spec.num_elements, entry.num_changed, spec.dtype)


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
        for one in manifest.tensors:
            if one.dtype not in DTYPES:
                raise ChannelError(f"a manifest of weights in which {one.name!r} is of type {one.dtype!r}")
            end = one.begin + one.spec.num_bytes
            if one.bucket not in manifest.whole_buckets or end > manifest.buckets[one.bucket]:
                raise ChannelError(f"a manifest of weights in which {one.name!r} lies outside its bucket")
        if len({one.name for one in manifest.tensors}) < len(manifest.tensors):
            raise ChannelError("a manifest of weights that names a tensor twice")
        if manifest.delta is not None:
            _check_delta(manifest, manifest.delta)
        return manifest


def _check_delta(manifest: Manifest, delta: Delta) -> None:
    if delta.first_bucket > len(manifest.buckets) or len({one.name for one in delta.tensors}) < len(delta.tensors):
        raise ChannelError("a manifest of weights whose changes name a tensor twice, or have no buckets")
    specs = manifest.specs
    for one in delta.tensors:
        if one.name not in specs or one.num_changed > specs[one.name].num_elements:
            raise ChannelError(f"a manifest of weights with {one.num_changed} changes of {one.name!r}, which has fewer")
        end = one.begin + _delta_bytes(one, specs[one.name])
        if one.bucket not in manifest.delta_buckets or end > manifest.buckets[one.bucket]:
            raise ChannelError(f"a manifest of weights in which the changes of {one.name!r} lie outside their bucket")

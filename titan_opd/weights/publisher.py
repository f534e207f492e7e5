"""The trainer's end: new weights are cast, gathered and laid out once, and kept for the engines that take them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from titan_opd.channel import PayloadStore
from titan_opd.ops import multi_digest
from titan_opd.weights.manifest import Delta, Manifest, ManifestRecord, Probe, lay_out, view_of
from titan_opd.weights.pieces import copy_all, copy_all_digested
from titan_opd.weights.source import Source
from titan_opd.weights.transports import Outlet, machine_id
from titan_opd.weights.version_delta import VersionDelta


def manifest_key(version: int) -> str:
    """Under which key the trainer's store has the manifest of a version."""
    return f"manifest-{version}"


@dataclass(frozen=True, eq=False)
class _Base:
    """The version that the next one is compared with: its number, its tensors and their digests by name."""

    version: int
    tensors: Mapping[str, Tensor]
    digests: Mapping[str, int]


class WeightPublisher:
    """Publishes one version after the other; the newest two can be had.

    All gatherings of a version end before the first engine hears of it, so the trainer's collectives never wait for
    an engine.

    Args:
        source: the weights; all processes of the trainer walk through them together.
        outlets: how engines get the bytes; the first one makes the memory that all of them serve. Empty in a process
            that only takes part in the gathering.
        store: for the manifests; None where another process announces the versions.
        bucket_bytes: of a published bucket; a larger tensor has one of its own.
        digests: whether the manifests carry digests of all tensors.
        delta: whether a version is also laid out as what changed since the one before.

    Attributes:
        metrics: of the last version: how much of it changed, and how large the changes are against the whole; empty
            where nothing was compared.

    Raises:
        ValueError: changes without digests, which alone tell whether they were made to the right version.
    """

    def __init__(
        self,
        source: Source,
        outlets: Sequence[Outlet],
        store: PayloadStore | None,
        *,
        bucket_bytes: int,
        digests: bool = True,
        delta: bool = False,
    ) -> None:
        if delta and not digests:
            raise ValueError("changes need digests (delta = True, digests = False): nothing else finds a wrong base")
        self.source = source
        self._outlets = list(outlets)
        self._store = store
        self._bucket_bytes = bucket_bytes
        self._digests = digests
        self.metrics: dict[str, float] = {}
        self._delta = delta
        self._published: list[int] = []
        self._base: _Base | None = None

    @property
    def transports(self) -> list[str]:
        """What engines can choose from."""
        return [outlet.name for outlet in self._outlets]

    def publish(self, version: int, *, probe: Probe | None = None) -> Manifest | None:
        """Keep the weights of `version` for the engines, and forget those before the one that was newest.

        Args:
            version: newer than all before.
            probe: what the engines compare themselves with.

        Returns:
            What was published; None in a process without outlets.

        Raises:
            TransferError: a gathering failed.
            StorageError, ChannelError: there is no room.
        """
        while len(self._published) > 1:
            self._forget(self._published.pop(0))
        if not self._outlets:
            self.source.take_part()
            return None
        entries, sizes = lay_out(self.source.specs, self._bucket_bytes)
        self._published.append(version)
        buckets = [self._outlets[0].allocate(version, index, size) for index, size in enumerate(sizes)]
        published = {entry.name: view_of(buckets[entry.bucket], entry) for entry in entries}
        digests = self._fill(published)
        if self._digests:
            entries = [msgspec.structs.replace(entry, digest=digests[entry.name]) for entry in entries]
        delta = self._publish_delta(version, published, buckets) if self._delta else None
        offers = {outlet.name: outlet.offer(version, buckets) for outlet in self._outlets}
        sizes = [bucket.numel() for bucket in buckets]
        manifest = Manifest(version, entries, sizes, offers, machine_id(), probe, delta)
        if self._delta:
            self._base = _Base(version, published, manifest.digests)
        if self._store is not None:
            self._store.put(manifest_key(version), ManifestRecord.of(manifest), timeout=0.0)
        return manifest

    def _fill(self, published: Mapping[str, Tensor]) -> dict[str, int]:
        """Copy all weights into the tensors that are published; returns their digests where these are wanted.

        They are taken on the way of tensors that come whole, and afterwards of those that come in parts.
        """
        digests: dict[str, int] = {}
        for pieces in self.source.buckets():
            whole = [piece for piece in pieces if self._digests and piece.tensor.shape == published[piece.name].shape]
            names = {piece.name for piece in whole}
            parts = [piece for piece in pieces if piece.name not in names]
            slots = [piece.rows_of(published[piece.name]) for piece in whole]
            found = copy_all_digested([piece.tensor for piece in whole], slots)
            digests |= {piece.name: value for piece, value in zip(whole, found, strict=True)}
            copy_all([piece.tensor for piece in parts], [piece.rows_of(published[piece.name]) for piece in parts])
        if self._digests:
            rest = [name for name in published if name not in digests]
            digests |= zip(rest, multi_digest([published[name] for name in rest]), strict=True)
        return digests

    def _publish_delta(self, version: int, published: Mapping[str, Tensor], buckets: list[Tensor]) -> Delta | None:
        """Lay out what changed since the version before, in further `buckets`; None where that is of no use."""
        base, self.metrics = self._base, {}
        if base is None:
            return None
        begin = time.perf_counter()
        changes = VersionDelta(base.tensors, published)
        self.metrics = changes.metrics()
        delta = None
        if changes.is_worthwhile:
            first = len(buckets)
            delta, sizes = changes.lay_out(
                base.version, base.digests, first_bucket=first, bucket_bytes=self._bucket_bytes
            )
            buckets += [self._outlets[0].allocate(version, first + index, size) for index, size in enumerate(sizes)]
            changes.write(delta, buckets)
        self.metrics["seconds/weights_delta"] = time.perf_counter() - begin
        return delta

    def close(self) -> None:
        """Forget all versions."""
        self._base = None
        for version in self._published:
            self._forget(version)
        self._published.clear()
        for outlet in self._outlets:
            outlet.close()

    def _forget(self, version: int) -> None:
        if self._store is not None:
            self._store.release([manifest_key(version)])
        for outlet in self._outlets:
            outlet.forget(version)

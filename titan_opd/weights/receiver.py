"""The engine's end: a version's manifest, its bytes, and the checks before and after they are written.

    before a byte is written   names, shapes and types are those of the engine's model (`LayoutError`)
    as the bytes come          each bucket has its length
    after the last one         the stored bytes have the digests of the cast bytes at the trainer; where storage cannot
                               be read, the bytes written have, and what changed at the trainer has changed here
    then                       a fixed text has the log-probabilities that it has under the trainer's weights

Only after all of them may the version be announced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_opd.channel import Address, ChannelError, PayloadFetcher
from titan_opd.ops import multi_digest
from titan_opd.weights.errors import TransferError, VerificationError
from titan_opd.weights.manifest import Manifest, ManifestRecord, Probe
from titan_opd.weights.mirror import Mirror
from titan_opd.weights.publisher import manifest_key
from titan_opd.weights.target import WeightTarget, WeightUpdate
from titan_opd.weights.transports import (
    ChannelInlet,
    CudaIpcInlet,
    Deadline,
    Inlet,
    InProcess,
    ProcessGroupInlet,
    SharedMemoryInlet,
)
from titan_opd.weights.verify import check_digests, check_layout, check_moved
from titan_opd.weights.version_delta import digest_of_version


@dataclass(frozen=True)
class Checks:
    """Which of the checks after the last byte are made; those before it always are.

    Attributes:
        digest: compare digests.
        probe: compare log-probabilities.
    """

    digest: bool = True
    probe: bool = True

    @classmethod
    def of(cls, verify: str) -> Checks:
        """As `weights.verify` says: "digest", "probe", "both" or "none"."""
        return cls(verify in ("digest", "both"), verify in ("probe", "both"))


class WeightReceiver:
    """Takes published versions into one engine. For one thread.

    Args:
        fetcher: fetches manifests, and buckets where no faster way leads to them.
        worker: who has the engine, for errors.
        checks: after the last byte.
        transport: "auto", or the one to use.
        timeout: seconds for a whole version.
        device: the engine's.
        local: the published versions of this process, for the transport "in_process".
        delta: take a version as what changed, when the engine has the one before it.

    Attributes:
        transport: the one that brought the last version; "" before the first.
        took_delta: whether the last version came as what changed.
        probe_gap: what `check_probe` found after it, in nats; None where it was not asked for.

    Raises:
        ValueError: changes without digests, which alone tell whether they were made to the right version.
    """

    def __init__(
        self,
        fetcher: PayloadFetcher,
        *,
        worker: str,
        checks: Checks,
        transport: str,
        timeout: float,
        device: torch.device,
        local: InProcess | None = None,
        delta: bool = False,
    ) -> None:
        if delta and not checks.digest:
            raise ValueError(f"changes need digests (delta = True, {checks}): nothing else finds a wrong base")
        self.transport = ""
        self.took_delta = False
        self.probe_gap: float | None = None
        self._fetcher = fetcher
        self._worker = worker
        self._checks = checks
        self._wanted = transport
        self._timeout = timeout
        self._device = device
        self._local = local
        self._inlets: dict[str, Inlet] = {}
        self._previous: dict[str, int] = {}  # digests of the version that the engine has
        self._delta = delta
        self._mirror: Mirror | None = None

    def take(self, target: WeightTarget, store: Address, version: int) -> None:
        """Put a published version into an engine.

        Args:
            target: the engine.
            store: where the trainer keeps the manifests.
            version: as announced.

        Raises:
            LayoutError: the weights are not those of the engine's model. The old version is in service.
            ChannelError, TransferError: the bytes did not come. The old version is in service if none came at all.
            VerificationError: the engine does not hold what was sent; it serves nothing.
        """
        deadline = Deadline(self._timeout)
        key = manifest_key(version)
        manifest = self._fetcher.fetch(store, key, ManifestRecord, timeout=self._timeout).manifest()
        inlet = self._inlet(manifest)
        previous, self._previous = self._previous, {}  # what it has is not known again before the update is complete
        as_delta = self._has_base(manifest, previous)
        wanted = manifest.delta_buckets if as_delta else manifest.whole_buckets
        buckets = inlet.buckets(manifest, wanted, manifest.offers[inlet.name], deadline)
        if self._delta and not target.takes_rows:
            self._mirror = target = self._mirror or Mirror(target)
        about = {"worker": self._worker, "checks": self._checks, "previous": previous}
        self.probe_gap = put_in(target, manifest, buckets, as_delta=as_delta, **about)
        self._previous = manifest.digests
        self.transport, self.took_delta = inlet.name, as_delta

    def _has_base(self, manifest: Manifest, previous: Mapping[str, int]) -> bool:
        """Whether the engine has, verified, the very bytes that the changes are against."""
        delta = manifest.delta if self._delta else None
        return delta is not None and bool(previous) and digest_of_version(previous) == delta.base_digest

    def close(self) -> None:
        """Let go of what the transports hold."""
        for inlet in self._inlets.values():
            inlet.close()

    def _inlet(self, manifest: Manifest) -> Inlet:
        name = self._wanted if self._wanted != "auto" else self._best(manifest)
        if name not in manifest.offers:
            raise TransferError(
                f"weights.transport = {name!r}: the trainer offers {', '.join(manifest.offers)} for version "
                f"{manifest.version}; start the worker with the trainer's configuration"
            )
        if name not in self._inlets:
            self._inlets[name] = self._open(name)
        return self._inlets[name]

    def _best(self, manifest: Manifest) -> str:
        """The one with the fewest copies that leads from the trainer to here."""
        if self._local is not None and "in_process" in manifest.offers:
            return "in_process"
        offer = manifest.offers.get("shared_memory")
        if offer is not None and SharedMemoryInlet().can_read(manifest, offer):
            return "shared_memory"
        return "channel"

    def _open(self, name: str) -> Inlet:
        match name:
            case "in_process" if self._local is not None:
                return self._local
            case "shared_memory":
                return SharedMemoryInlet()
            case "process_group":
                return ProcessGroupInlet(self._device)
            case "cuda_ipc":
                return CudaIpcInlet(self._device)
            case "channel":
                return ChannelInlet(self._fetcher)
        raise TransferError(f"{self._worker} is not in the trainer's process, as weights.transport = {name!r} needs")


def put_in(
    target: WeightTarget,
    manifest: Manifest,
    buckets: Iterator[Tensor],
    *,
    worker: str,
    checks: Checks,
    previous: Mapping[str, int],
    as_delta: bool = False,
) -> float | None:
    """Write a version into an engine and check it, as the head of this module says.

    Args:
        target: the engine.
        manifest: of the version.
        buckets: its bytes, in order.
        worker: who has the engine, for errors.
        checks: after the last byte.
        previous: digests of the version that the engine has now, empty where they are not known.
        as_delta: the buckets are those of the changes, and the engine has their base; its updates take changes.

    Returns:
        What `check_probe` does; None where it was not asked for.

    Raises:
        LayoutError, TransferError, ChannelError, VerificationError: as `WeightReceiver.take`.
    """
    version = manifest.version
    check_layout(manifest.specs, target.weight_specs(), version=version, worker=worker)
    sent = manifest.digests
    with target.update_weights(version) as update:
        unreadable = [name for name in sent if checks.digest and update.stored(name) is None]
        fingerprints = {name: update.fingerprint(name) for name in unreadable}
        if as_delta:
            update.keep(manifest.unchanged)
            for index in manifest.delta_buckets:
                pieces, changes = manifest.changes(index, _next(buckets, manifest, index))
                update.write(pieces)
                update.change(changes)
        else:
            for index in manifest.whole_buckets:
                update.write(manifest.pieces(index, _next(buckets, manifest, index)))
        update.finish()
        about = {"version": version, "worker": worker}
        if checks.digest:
            readable = [name for name in sent if name not in fingerprints]
            digests = multi_digest([stored_tensor(update, name) for name in readable])
            stored = dict(zip(readable, digests, strict=True))
            check_digests(sent, stored, previous=previous, what="stored", **about)
            check_written(update, {name: sent[name] for name in unreadable}, fingerprints, previous=previous, **about)
        if checks.probe and manifest.probe is not None:
            return check_probe(manifest.probe, update, **about)
    return None


def check_written(
    update: WeightUpdate,
    sent: Mapping[str, int],
    fingerprints: Mapping[str, int | None],
    *,
    previous: Mapping[str, int],
    version: int,
    worker: str,
) -> None:
    """Refuse an update of parameters that cannot be read back: other bytes were handed over than were sent, or what
    changed at the trainer is still the old one here.

    Args:
        update: finished.
        sent: digests of these parameters' cast bytes, at the trainer.
        fingerprints: of what was stored for them before.
        previous: digests of the version that the engine had before, where they are known.
        version, worker: for the error.

    Raises:
        VerificationError: names the tensors.
    """
    written = update.written_digests() if sent else {}
    silent = [name for name in sent if name not in written]
    if silent:
        raise VerificationError(
            f"version {version} at {worker}: the engine does not say what it wrote for {silent[0]!r} and "
            f"{len(silent) - 1} more tensors"
        )
    about = {"previous": previous, "version": version, "worker": worker}
    check_digests(sent, {name: written[name] for name in sent}, what="written", **about)
    known = {name: value for name, value in fingerprints.items() if value is not None}
    check_moved(sent, before=known, fingerprint=update.fingerprint, **about)


def check_probe(probe: Probe, update: WeightUpdate, *, version: int, worker: str) -> float:
    """Compare the engine's log-probabilities of a fixed text with the trainer's.

    Returns:
        Their mean absolute difference, in nats a token.

    Raises:
        VerificationError: they differ by more than what rounding explains.
    """
    found = update.logprobs(torch.tensor(probe.token_ids)).cpu().double()
    expected = torch.tensor(probe.logprobs, dtype=torch.float64)
    difference = float((found - expected).abs().mean())
    if not difference <= probe.tolerance:  # NaN is no agreement
        raise VerificationError(
            f"version {version} at {worker}: log-probabilities of a fixed text of {len(probe.token_ids)} tokens differ "
            f"from the trainer's by {difference:.3g} nats a token on average, {probe.tolerance:g} are allowed for "
            "rounding: the engine computes something else with these weights"
        )
    return difference


def stored_tensor(update: WeightUpdate, name: str) -> Tensor:
    """A parameter as it is stored, of an engine whose storage can be read."""
    tensor = update.stored(name)
    assert tensor is not None, name
    return tensor.detach()


def _next(buckets: Iterator[Tensor], manifest: Manifest, index: int) -> Tensor:
    try:
        return next(buckets)
    except StopIteration:
        raise TransferError(
            f"version {manifest.version} ends before bucket {index} of {len(manifest.buckets)}, {manifest.names(index)}"
        ) from None
    except (ChannelError, TransferError) as error:
        raise TransferError(
            f"version {manifest.version}: bucket {index} of {len(manifest.buckets)} ({manifest.names(index)}) did not "
            f"come: {error}"
        ) from error

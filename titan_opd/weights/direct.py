"""From the trainer's parameters into an engine in the same process.

Where the engine takes rows and its storage can be read, straight: no published copy, two buckets at most. Else by a
copy in this process's memory, whole tensors at a time.
"""

from __future__ import annotations

from torch import Tensor

from titan_opd.ops import multi_digest
from titan_opd.weights.manifest import Probe
from titan_opd.weights.pieces import WeightSpec
from titan_opd.weights.publisher import WeightPublisher
from titan_opd.weights.receiver import Checks, check_probe, put_in
from titan_opd.weights.source import WeightSource
from titan_opd.weights.target import WeightTarget, WeightUpdate
from titan_opd.weights.transports import InProcess
from titan_opd.weights.verify import check_digests, check_layout


class DirectDelivery:
    """Puts the trainer's weights into the engine of the same process, and checks them there.

    Args:
        source: the weights; all processes that share them deliver together.
        worker: who has the engine, for errors.
        checks: after the last byte.
        bucket_bytes: of the copy, where there is one.
    """

    def __init__(self, source: WeightSource, *, worker: str, checks: Checks, bucket_bytes: int) -> None:
        self._source = source
        self._worker = worker
        self._checks = checks
        self._bucket_bytes = bucket_bytes
        self._previous: dict[str, int] = {}

    def deliver(self, target: WeightTarget, version: int, *, probe: Probe | None = None) -> float | None:
        """Make the engine serve the trainer's present weights as `version`.

        Args:
            target: the engine.
            version: the policy version.
            probe: what the engine compares itself with.

        Returns:
            What `check_probe` does; None where it was not asked for.

        Raises:
            LayoutError, TransferError: the old version is in service if nothing was written.
            VerificationError: the engine does not hold what was sent; it serves nothing.
        """
        if target.takes_rows:
            return self._deliver_rows(target, version, probe)
        return self._deliver_copy(target, version, probe)

    def _deliver_rows(self, target: WeightTarget, version: int, probe: Probe | None) -> float | None:
        """Digests are of pieces, as the source cuts them, so that no whole tensor is needed."""
        about = {"version": version, "worker": self._worker}
        dtype = self._source.dtype
        offered = {name: WeightSpec(tuple(shape), dtype) for name, shape in self._source.shapes.items()}
        check_layout(offered, target.weight_specs(), **about)
        sent: dict[str, int] = {}
        places: dict[str, tuple[str, int, int]] = {}
        with target.update_weights(version) as update:
            for pieces in self._source.buckets():
                if not self._checks.digest:
                    update.write(pieces)
                    continue
                digests = update.write_digested(pieces)
                for piece, value in zip(pieces, digests, strict=True):
                    first, num_rows = piece.first_row, piece.tensor.shape[0]
                    key = f"{piece.name}[{first}:{first + num_rows}]"
                    sent[key], places[key] = value, (piece.name, first, num_rows)
            update.finish()
            # Read when all is written: a parameter that lies on top of another one shows.
            stored = [_stored(update, name).narrow(0, *rows) for name, *rows in places.values()]
            found = dict(zip(places, multi_digest(stored), strict=True))
            check_digests(sent, found, previous=self._previous, what="stored", **about)
            gap = check_probe(probe, update, **about) if self._checks.probe and probe is not None else None
        self._previous = sent
        return gap

    def _deliver_copy(self, target: WeightTarget, version: int, probe: Probe | None) -> float | None:
        memory = InProcess()
        publisher = WeightPublisher(
            self._source, [memory], None, bucket_bytes=self._bucket_bytes, digests=self._checks.digest
        )
        manifest = publisher.publish(version, probe=probe)
        assert manifest is not None
        buckets = memory.published(version)
        previous = self._previous
        gap = put_in(target, manifest, iter(buckets), worker=self._worker, checks=self._checks, previous=previous)
        self._previous = manifest.digests
        return gap


def _stored(update: WeightUpdate, name: str) -> Tensor:
    stored = update.stored(name)
    assert stored is not None, f"an engine that takes rows can be read, and {name} cannot"
    return stored.detach()

"""From the trainer's parameters into an engine in the same process.

No published copy is made. An engine that takes rows gets them bucket by bucket, two at most, and its storage is read
back; another gets whole tensors, those that this process has whole anyway as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from titan_opd.ops import multi_digest
from titan_opd.weights.manifest import Probe
from titan_opd.weights.pieces import Piece, copy_all
from titan_opd.weights.receiver import Checks, check_probe, check_written, stored_tensor
from titan_opd.weights.source import Source
from titan_opd.weights.target import WeightTarget
from titan_opd.weights.verify import check_digests, check_layout


class DirectDelivery:
    """Puts the trainer's weights into the engine of the same process, and checks them there.

    Args:
        source: the weights; all processes that share them deliver together.
        worker: who has the engine, for errors.
        checks: after the last byte.
    """

    def __init__(self, source: Source, *, worker: str, checks: Checks) -> None:
        self._source = source
        self._worker = worker
        self._checks = checks
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
        return self._deliver_whole(target, version, probe)

    def _deliver_rows(self, target: WeightTarget, version: int, probe: Probe | None) -> float | None:
        """Digests are of pieces, as the source cuts them, so that no whole tensor is needed."""
        about = {"version": version, "worker": self._worker}
        check_layout(self._source.specs, target.weight_specs(), **about)
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
            stored = [stored_tensor(update, name).narrow(0, *rows) for name, *rows in places.values()]
            found = dict(zip(places, multi_digest(stored), strict=True))
            check_digests(sent, found, previous=self._previous, what="stored", **about)
            gap = check_probe(probe, update, **about) if self._checks.probe and probe is not None else None
        self._previous = sent
        return gap

    def _deliver_whole(self, target: WeightTarget, version: int, probe: Probe | None) -> float | None:
        """Whole parameters, one after the other, for an engine that packs them away."""
        about = {"version": version, "worker": self._worker}
        check_layout(self._source.specs, target.weight_specs(), **about)
        sent: dict[str, int] = {}
        with target.update_weights(version) as update:
            fingerprints = {name: update.fingerprint(name) for name in self._source.specs if self._checks.digest}
            for pieces in self._whole_tensors():
                if self._checks.digest:
                    digests = multi_digest([piece.tensor for piece in pieces])
                    sent |= zip((piece.name for piece in pieces), digests, strict=True)
                update.write(pieces)
            update.finish()
            check_written(update, sent, fingerprints, previous=self._previous, **about)
            gap = check_probe(probe, update, **about) if self._checks.probe and probe is not None else None
        self._previous = sent
        return gap

    def _whole_tensors(self) -> Iterator[list[Piece]]:
        """All parameters, whole and of the engine's type, in memory that is not reused."""
        specs = self._source.specs
        begun: dict[str, Tensor] = {}
        missing_rows: dict[str, int] = {}
        for pieces in self._source.buckets():
            whole = []
            for piece in pieces:
                name, spec = piece.name, specs[piece.name]
                if piece.stays and piece.tensor.shape == spec.shape and piece.tensor.dtype == spec.dtype:
                    whole.append(piece)
                    continue
                if name not in begun:
                    begun[name] = torch.empty(spec.shape, dtype=spec.dtype, device=piece.tensor.device)
                    missing_rows[name] = spec.shape[0]
                copy_all([piece.tensor], [piece.rows_of(begun[name])])
                missing_rows[name] -= piece.tensor.shape[0]
                if missing_rows[name] == 0:
                    whole.append(Piece(name, 0, begun.pop(name), stays=True))
            if whole:
                yield whole

"""From the trainer's parameters straight into an engine in the same process: no published copy, two buckets at most."""

from __future__ import annotations

from torch import Tensor

from titan_opd.weights.manifest import Probe
from titan_opd.weights.pieces import WeightSpec
from titan_opd.weights.receiver import Checks, check_probe
from titan_opd.weights.source import WeightSource
from titan_opd.weights.target import WeightTarget, WeightUpdate
from titan_opd.weights.verify import check_digests, check_layout, digest


class DirectDelivery:
    """Puts the trainer's weights into the engine of the same process, and checks them there.

    Args:
        source: the weights; all processes that share them deliver together.
        worker: who has the engine, for errors.
        checks: after the last byte.
    """

    def __init__(self, source: WeightSource, *, worker: str, checks: Checks) -> None:
        self._source = source
        self._worker = worker
        self._checks = checks

    def deliver(self, target: WeightTarget, version: int, *, probe: Probe | None = None) -> None:
        """Make the engine serve the trainer's present weights as `version`.

        Digests are of pieces, as the source cuts them, so that no whole tensor is needed.

        Args:
            target: the engine; its storage must be readable when digests are compared.
            version: the policy version.
            probe: what the engine compares itself with.

        Raises:
            LayoutError, TransferError: the old version is in service if nothing was written.
            VerificationError: the engine does not hold what was sent; it serves nothing.
        """
        about = {"version": version, "worker": self._worker}
        dtype = self._source.dtype
        offered = {name: WeightSpec(tuple(shape), dtype) for name, shape in self._source.shapes.items()}
        check_layout(offered, target.weight_specs(), **about)
        sent: dict[str, int] = {}
        places: dict[str, tuple[str, int, int]] = {}
        with target.update_weights(version) as update:
            for pieces in self._source.buckets():
                for piece in pieces if self._checks.digest else ():
                    first, num_rows = piece.first_row, piece.tensor.shape[0]
                    key = f"{piece.name}[{first}:{first + num_rows}]"
                    sent[key], places[key] = digest(piece.tensor), (piece.name, first, num_rows)
                update.write(pieces)
            update.finish()
            # Read when all is written: a parameter that lies on top of another one shows.
            found = {key: digest(_stored(update, name).narrow(0, *rows)) for key, (name, *rows) in places.items()}
            check_digests(sent, found, previous={}, what="stored", **about)
            if self._checks.probe and probe is not None:
                check_probe(probe, update, **about)


def _stored(update: WeightUpdate, name: str) -> Tensor:
    stored = update.stored(name)
    if stored is None:
        raise ValueError(f"the engine's storage of {name!r} cannot be read; publish the weights to it instead")
    return stored.detach()

"""Changes for engines that take whole parameters only: a copy of the last version, into which they are put first.

The copy costs this process the memory of one version. Nothing reaches the engine before all bytes of an update have
come, so one that breaks off on its way leaves the old version in service.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from titan_opd.weights.delta import Change
from titan_opd.weights.pieces import Piece, WeightSpec
from titan_opd.weights.target import WeightTarget, WeightUpdate


class Mirror:
    """A `WeightTarget` in front of another one, whose updates take changes, too.

    Args:
        target: the engine.
    """

    takes_rows = False

    def __init__(self, target: WeightTarget) -> None:
        self._target = target
        self._tensors = {
            name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in target.weight_specs().items()
        }

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        """The engine's."""
        return self._target.weight_specs()

    @contextmanager
    def update_weights(self, version: int) -> Iterator[MirroredUpdate]:
        """As the engine's. After an error the copy is of no version: the next update must be a whole one."""
        with self._target.update_weights(version) as update:
            yield MirroredUpdate(self._tensors, update)


class MirroredUpdate:
    """An update under way, a `titan_opd.weights.target.ChangingUpdate`.

    Args:
        tensors: the copy, by name.
        update: the engine's.
    """

    def __init__(self, tensors: Mapping[str, Tensor], update: WeightUpdate) -> None:
        self._tensors = tensors
        self._update = update
        self._complete: set[str] = set()

    def write(self, pieces: Sequence[Piece]) -> None:
        """Take some whole parameters."""
        for piece in pieces:
            self._tensors[piece.name].copy_(piece.tensor)
            self._complete.add(piece.name)

    def change(self, changes: Sequence[Change]) -> None:
        """Take new bits for some elements of some parameters."""
        for one in changes:
            one.apply(self._tensors[one.name])
            self._complete.add(one.name)

    def keep(self, names: Sequence[str]) -> None:
        """These parameters have not changed."""
        self._complete.update(names)

    def finish(self) -> None:
        """Hand over to the engine what is complete, in the engine's order; it refuses an update that lacks any."""
        self._update.write([Piece(name, 0, self._tensors[name]) for name in self._tensors if name in self._complete])
        self._update.finish()

    def stored(self, name: str) -> Tensor | None:
        return self._update.stored(name)

    def written_digests(self) -> Mapping[str, int]:
        return self._update.written_digests()

    def fingerprint(self, name: str) -> int | None:
        return self._update.fingerprint(name)

    def logprobs(self, token_ids: Tensor) -> Tensor:
        return self._update.logprobs(token_ids)

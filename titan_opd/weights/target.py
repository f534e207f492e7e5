"""What an engine offers, so that new weights can be put into it and be checked there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor

from titan_opd.weights.delta import Change
from titan_opd.weights.pieces import Piece, WeightSpec


class WeightUpdate(Protocol):
    """An update under way. Calls come in this order: `write` as often as needed, `finish`, then the questions."""

    def write(self, pieces: Sequence[Piece]) -> None:
        """Take some rows of some parameters, each row once. The memory of pieces that do not stay is reused after the
        call."""

    def finish(self) -> None:
        """All rows have been written: make the stored weights what the engine computes with."""

    def stored(self, name: str) -> Tensor | None:
        """The whole parameter as it is stored; None where it cannot be read as it was sent (packed, another layout,
        another process)."""

    def written_digests(self) -> Mapping[str, int]:
        """For every parameter that `stored` cannot read: the digest (`verify.digest`) of its bytes as they were handed
        over to the model, computed there."""

    def fingerprint(self, name: str) -> int | None:
        """Of a parameter that `stored` cannot read: a number that changes when what is stored for it changes. None
        where not even that can be told. May be asked before the first `write`, too."""

    def logprobs(self, token_ids: Tensor) -> Tensor:
        """[T - 1] float32: with the stored weights, the log-probability of each of `token_ids` [T] but the first,
        given those before it, over the tokenizer's whole vocabulary at temperature 1."""


class ChangingUpdate(WeightUpdate, Protocol):
    """An update that can also be made of changes against the version that the engine has. Each parameter comes in one
    of three ways: by `write`, by `change` or by `keep`."""

    def change(self, changes: Sequence[Change]) -> None:
        """Overwrite some elements of some parameters, each parameter once. Memory is reused as in `write`."""

    def keep(self, names: Sequence[str]) -> None:
        """These parameters stay as they are."""


class RowsUpdate(ChangingUpdate, Protocol):
    """An update of an engine that takes rows."""

    def write_digested(self, pieces: Sequence[Piece]) -> list[int]:
        """As `write`; returns the digest of each piece as it was cast, taken on the way."""


@runtime_checkable
class WeightTarget(Protocol):
    """An engine that takes weights.

    Attributes:
        takes_rows: `write` takes rows of a parameter in any order, `stored` reads all of them, and an update is a
            `RowsUpdate`. Otherwise it is given whole parameters only, and says what it wrote by `written_digests`.
    """

    takes_rows: bool

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        """What a complete update consists of, by Hugging Face name; a tied output projection is not among them."""

    def update_weights(self, version: int) -> AbstractContextManager[WeightUpdate]:
        """Put in the weights of policy version `version`, in place.

        When the block is left normally the engine serves this version. When it is left by an error before the first
        `write`, the old version stays in service; by one after it, the engine serves nothing until a complete update.
        Nothing is written to running sequences inside the block.

        Raises:
            ValueError: the version would fall.
        """

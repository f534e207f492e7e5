"""An update in pieces: rows of parameters into a decoder's own storage, or changes of them, counted and readable
afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from titan_opd.models import Decoder, PackedAttention
from titan_opd.weights.delta import Change
from titan_opd.weights.pieces import Piece, copy_all, copy_all_digested


class RowUpdate:
    """Rows of parameters on their way into a decoder; a `titan_opd.weights.target.RowsUpdate`.

    Args:
        decoder: is overwritten.
        parameters: its, by name; they keep their storage.
        version: of the weights.
        vocab_size: tokens of the tokenizer.
    """

    def __init__(self, decoder: Decoder, parameters: Mapping[str, Tensor], version: int, vocab_size: int) -> None:
        self.has_written = self.is_finished = False
        self._decoder = decoder
        self._parameters = parameters
        self._num_rows: Counter[str] = Counter()
        self._version = version
        self._vocab_size = vocab_size

    @torch.no_grad()
    def write(self, pieces: Sequence[Piece]) -> None:
        """Copy some rows of some parameters, all in one call.

        Raises:
            ValueError: a name is unknown, or the decoder has no such rows; nothing of these pieces is written then.
        """
        slots = self._slots(pieces)
        self.has_written = True
        copy_all([piece.tensor for piece in pieces], slots)

    @torch.no_grad()
    def write_digested(self, pieces: Sequence[Piece]) -> list[int]:
        """As `write`; returns the digest of each piece as it was cast, taken on the way."""
        slots = self._slots(pieces)
        self.has_written = True
        return copy_all_digested([piece.tensor for piece in pieces], slots)

    def _slots(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Where the pieces belong. Counts them, too."""
        slots = []
        for piece in pieces:
            parameter = self._parameters.get(piece.name)
            if parameter is None:
                raise ValueError(f"weights hold {piece.name!r}, which the engine's model has no parameter for")
            rows = piece.tensor.shape[0]
            if piece.first_row + rows > parameter.shape[0] or piece.tensor.shape[1:] != parameter.shape[1:]:
                raise ValueError(
                    f"rows {piece.first_row} to {piece.first_row + rows} of {piece.name!r}, "
                    f"{list(piece.tensor.shape)}, do not fit the engine's parameter, {list(parameter.shape)}"
                )
            slots.append(piece.rows_of(parameter))
        for piece in pieces:
            self._num_rows[piece.name] += piece.tensor.shape[0]
        return slots

    def change(self, changes: Sequence[Change]) -> None:
        """Overwrite some elements of some parameters, where they are stored; the others keep the version before.

        Raises:
            ValueError: a name is unknown; nothing is written then.
        """
        self.keep([one.name for one in changes])
        self.has_written = True
        for one in changes:
            one.apply(self._parameters[one.name])

    def keep(self, names: Sequence[str]) -> None:
        """All rows of these parameters are there already.

        Raises:
            ValueError: a name is unknown.
        """
        unknown = [name for name in names if name not in self._parameters]
        if unknown:
            raise ValueError(f"weights hold {unknown[0]!r}, which the engine's model has no parameter for")
        for name in names:
            self._num_rows[name] += self._parameters[name].shape[0]

    def finish(self) -> None:
        """All rows are there.

        Raises:
            ValueError: rows are missing, or came twice; it names their parameters.
        """
        wrong = [name for name, value in self._parameters.items() if self._num_rows[name] != value.shape[0]]
        if wrong:
            counted = ", ".join(
                f"{name} ({self._num_rows[name]} of {self._parameters[name].shape[0]} rows)" for name in wrong[:5]
            )
            raise ValueError(f"the weights of version {self._version} lack rows, or bring some twice: {counted}")
        self.is_finished = True

    def stored(self, name: str) -> Tensor:
        """The decoder's own parameter."""
        return self._parameters[name]

    def written_digests(self) -> dict[str, int]:
        """None: all storage can be read."""
        return {}

    def fingerprint(self, name: str) -> None:
        """Not needed, for the same reason."""

    @torch.no_grad()
    def logprobs(self, token_ids: Tensor) -> Tensor:
        """[T - 1] float32: the log-probability of each of `token_ids` [T] but the first, given those before it."""
        ids = token_ids.to(self._decoder.lm_head_weight.device)
        inputs = ids[:-1]
        attention = PackedAttention(torch.tensor([0, len(inputs)], dtype=torch.int32, device=ids.device), len(inputs))
        hidden = self._decoder(inputs, torch.arange(len(inputs), device=ids.device), attention)
        logits = (hidden @ self._decoder.lm_head_weight[: self._vocab_size].T).float()
        return logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)

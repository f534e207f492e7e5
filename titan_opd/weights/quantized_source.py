"""The stage between the trainer's weights and their way to the engines that quantises them."""

from __future__ import annotations

from collections.abc import Iterator

from titan_opd.weights.pieces import Piece, WeightSpec
from titan_opd.weights.quantization import TYPES, is_quantized, quantized_specs, quantized_tensors
from titan_opd.weights.source import WeightSource


class QuantizedSource:
    """What `WeightSource` hands out, with the weights of the linear layers quantised (`quantization.py`).

    A piece has whole rows, gathered from all processes that split them, so each is quantised by itself.

    Args:
        source: of the weights as they are cast.
        quantization: "int8" or "fp8".
    """

    def __init__(self, source: WeightSource, quantization: str) -> None:
        self._source = source
        self._dtype = TYPES[quantization]
        self.specs: dict[str, WeightSpec] = quantized_specs(source.specs, quantization)

    def buckets(self) -> Iterator[list[Piece]]:
        """As `WeightSource.buckets`; one piece at a time is quantised, and comes with the scales of its rows."""
        for pieces in self._source.buckets():
            yield [piece for piece in pieces if not is_quantized(piece.name)]
            for piece in pieces:
                if is_quantized(piece.name):
                    yield self._quantized(piece)

    def take_part(self) -> None:
        """As `WeightSource.take_part`; nothing is quantised."""
        self._source.take_part()

    def _quantized(self, piece: Piece) -> list[Piece]:
        cast = piece.tensor.to(self._source.specs[piece.name].dtype)
        tensors = quantized_tensors(piece.name, cast, self._dtype)
        return [Piece(name, piece.first_row, tensor, stays=True) for name, tensor in tensors]

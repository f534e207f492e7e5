"""Where new weights come from: the trainer's parameters under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from titan_opd.models import Decoder


def named_weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once, in a fixed order; a tied output projection goes by its embedding's name only."""
    for name, parameter in decoder.named_parameters():
        yield name, parameter.detach()

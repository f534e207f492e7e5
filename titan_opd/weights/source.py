"""Where new weights come from: the trainer's parameters under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from titan_opd.models import Decoder
from titan_opd.parallel import whole_tensor


def named_weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once and whole, in a fixed order; a tied output projection goes by its embedding's name only.

    A sharded parameter is gathered when its turn comes, so all processes must walk through the names together. No more
    than one whole tensor is held.
    """
    for name, parameter in decoder.named_parameters():
        yield name, whole_tensor(parameter)

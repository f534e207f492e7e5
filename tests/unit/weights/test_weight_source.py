"""The source hands out every row of every parameter once, cast once, and holds two buckets at most."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.writing import make_decoder
from titan_opd.weights.source import WeightSource


def collect(source):
    """What comes out, and the order of the names."""
    found = {name: torch.full(shape, torch.nan, dtype=source.dtype) for name, shape in source.shapes.items()}
    names = []
    for pieces in source.buckets():
        for piece in pieces:
            slot = piece.rows_of(found[piece.name])
            assert slot.isnan().all(), f"{piece.name} has a row twice"
            assert piece.tensor.dtype == source.dtype
            slot.copy_(piece.tensor)
            names.append(piece.name)
    return found, list(dict.fromkeys(names))


@settings(max_examples=25, deadline=None)
@given(
    tied=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bucket_bytes=st.integers(1, 40_000),
)
def test_every_row_comes_once_and_cast(tied, dtype, bucket_bytes):
    decoder = make_decoder(tie_word_embeddings=tied)
    source = WeightSource(decoder, dtype=dtype, bucket_bytes=bucket_bytes, timeout=10)
    found, names = collect(source)
    parameters = dict(decoder.named_parameters())
    assert names == list(parameters)
    for name, value in parameters.items():
        assert torch.equal(found[name], value.detach().to(dtype)), name
    largest_row = max(value.shape[1:].numel() for value in parameters.values()) * dtype.itemsize
    assert source.peak_bytes <= 2 * max(bucket_bytes, largest_row)
    assert source.held_bytes == 0


def test_what_is_handed_out_does_not_follow_the_parameters():
    """A version is what the parameters were: the next step may change them while engines read it."""
    decoder = make_decoder()
    for dtype in (torch.float32, torch.bfloat16):
        (pieces,) = list(WeightSource(decoder, dtype=dtype, bucket_bytes=1 << 24, timeout=10).buckets())
        kept = pieces[0].tensor.clone()
        with torch.no_grad():
            decoder.model.embed_tokens.weight.add_(1)
        assert torch.equal(pieces[0].tensor, kept)


def test_a_bucket_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"weights\.bucket_mb"):
        WeightSource(make_decoder(), dtype=torch.float32, bucket_bytes=0, timeout=1)

"""The source hands out every row of every parameter once, and holds nothing of what this process has whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.writing import make_decoder
from titan_opd.weights.pieces import copy_all
from titan_opd.weights.publisher import WeightPublisher
from titan_opd.weights.source import WeightSource
from titan_opd.weights.transports import InProcess


def collect(source):
    """What comes out, and the order of the names."""
    found = {name: torch.full(spec.shape, torch.nan, dtype=spec.dtype) for name, spec in source.specs.items()}
    names = []
    for pieces in source.buckets():
        for piece in pieces:
            slot = piece.rows_of(found[piece.name])
            assert slot.isnan().all(), f"{piece.name} has a row twice"
            copy_all([piece.tensor], [slot])
            names.append(piece.name)
    return found, list(dict.fromkeys(names))


@settings(max_examples=25, deadline=None)
@given(
    tied=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bucket_bytes=st.integers(1, 40_000),
)
def test_every_row_comes_once_and_is_cast_on_its_way(tied, dtype, bucket_bytes):
    decoder = make_decoder(tie_word_embeddings=tied)
    source = WeightSource(decoder, dtype=dtype, bucket_bytes=bucket_bytes, timeout=10)
    found, names = collect(source)
    parameters = dict(decoder.named_parameters())
    assert names == list(parameters)
    for name, value in parameters.items():
        assert torch.equal(found[name], value.detach().to(dtype)), name
    assert source.peak_bytes == 0  # tests/distributed/test_weight_stream.py has what is gathered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_published_does_not_follow_the_parameters(dtype):
    """A version is what the parameters were: the next step may change them while engines read it."""
    decoder = make_decoder()
    memory = InProcess()
    source = WeightSource(decoder, dtype=dtype, bucket_bytes=1 << 24, timeout=10)
    WeightPublisher(source, [memory], None, bucket_bytes=1 << 24).publish(1)
    (bucket,) = memory.published(1)
    kept = bucket.clone()
    with torch.no_grad():
        decoder.model.embed_tokens.weight.add_(1)
    assert torch.equal(bucket, kept)


def test_a_bucket_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"weights\.bucket_mb"):
        WeightSource(make_decoder(), dtype=torch.float32, bucket_bytes=0, timeout=1)

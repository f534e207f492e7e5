"""The KV cache as the decoder's attention."""

from __future__ import annotations

import pytest
import torch

from titan_opd.models import DecoderConfig
from titan_opd.rollout.kv_cache import KVCache, StepAttention


@pytest.fixture
def _fresh_memory_is_nan():
    """New memory is whatever was there before; here it is NaN, so that reading it shows."""
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_fresh_memory_is_nan")
def test_positions_that_nothing_was_written_to_do_not_reach_the_output():
    config = DecoderConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": 8,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 16,
        }
    )
    cache = KVCache(config, 2, 16, dtype=torch.float32, device=torch.device("cpu"))
    ones = torch.ones
    StepAttention(cache, torch.tensor([], dtype=torch.int64), [2, 9])(0, ones(11, 2, 4), ones(11, 1, 4), ones(11, 1, 4))
    decode = StepAttention(cache, torch.tensor([2, 9]), [])  # the shorter row has 7 positions that it never wrote
    assert torch.equal(decode(0, ones(2, 2, 4), ones(2, 1, 4), ones(2, 1, 4)), ones(2, 2, 4))

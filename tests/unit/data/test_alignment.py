"""The alignment rule against a model: packed rows give the log-probabilities of the response tokens."""

from __future__ import annotations

import torch

from tests.unit.data.make import make_scored
from titan_opd.data import pack
from titan_opd.models import Decoder, DecoderConfig, PackedAttention

VOCAB = 23


def make_decoder():
    config = DecoderConfig.from_dict(
        {
            "model_type": "qwen3",
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            "initializer_range": 0.5,  # far from uniform, so that a wrong row cannot pass
        }
    )
    decoder = Decoder(config)
    decoder.init_weights(torch.Generator().manual_seed(0))
    return decoder


@torch.no_grad()
def log_softmax(decoder, input_ids_T, positions_T, attention):
    hidden_TH = decoder(input_ids_T, positions_T, attention)
    return (hidden_TH @ decoder.lm_head_weight.T).log_softmax(-1)


def logprobs_token_by_token(decoder, trajectory):
    """log p(token | all tokens before it), from one forward pass per response token: no shift to get wrong."""
    prefix, logprobs = trajectory.prompt.token_ids.tolist(), []
    for token in trajectory.response_ids.tolist():
        length = len(prefix)
        attention = PackedAttention(torch.tensor([0, length], dtype=torch.int32), length)
        rows = log_softmax(decoder, torch.tensor(prefix), torch.arange(length), attention)
        logprobs.append(rows[-1, token])
        prefix.append(token)
    return torch.stack(logprobs)


def test_rows_at_loss_positions_predict_the_response_tokens():
    decoder, generator = make_decoder(), torch.Generator().manual_seed(1)
    scored = [
        make_scored(
            torch.randint(VOCAB, (prompt_length,), generator=generator).tolist(),
            torch.randint(VOCAB, (response_length,), generator=generator).tolist(),
            version=number,
        )
        for number, (prompt_length, response_length) in enumerate([(3, 4), (1, 6), (5, 1), (2, 0), (1, 1), (4, 3)])
    ]
    batches = pack(scored, 14)
    assert len(batches) > 1
    assert any(len(batch.cu_seqlens) > 3 for batch in batches)
    for batch in batches:
        attention = PackedAttention(batch.cu_seqlens, batch.max_seqlen)
        rows_TV = log_softmax(decoder, batch.input_ids, batch.positions, attention)
        packed_N = rows_TV[batch.loss_positions].gather(1, batch.scores.labels[:, None])[:, 0]
        for number in batch.policy_versions.unique().tolist():
            expected = logprobs_token_by_token(decoder, scored[number].trajectory)
            torch.testing.assert_close(packed_N[batch.policy_versions == number], expected, atol=1e-5, rtol=1e-5)

"""Samples and engines for the tests of this folder, and answers computed in another way to hold them against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_opd.config.schema import RolloutConfig
from titan_opd.data.records import Prompt, Sample, Trajectory
from titan_opd.models import Decoder, DecoderConfig, PackedAttention
from titan_opd.rollout import NativeEngine

VOCAB_SIZE = 101  # tokens, and rows of the embedding, of tests/helpers/tiny_models.py
STOP_IDS = tuple(range(0, VOCAB_SIZE, 12))  # enough of them that some answers stop


def make_samples(num_samples: int, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[Sample]:
    """Prompts of 1 to 12 tokens, in no order of length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (num_samples,), generator=generator).tolist()
    return [
        Sample(number, 0, 0, Prompt(f"prompt-{number}", torch.randint(vocab_size, (length,), generator=generator)))
        for number, length in enumerate(lengths)
    ]


def make_engine(
    decoder: Decoder,
    *,
    max_concurrent: int = 4,
    vocab_size: int = VOCAB_SIZE,
    stop_ids: Sequence[int] = STOP_IDS,
    seed: int = 0,
    recompute_kv: bool = True,
    fixed_shapes: bool = False,
) -> NativeEngine:
    return NativeEngine(
        decoder,
        config=RolloutConfig(max_concurrent=max_concurrent, fixed_shapes=fixed_shapes),
        stop_ids=stop_ids,
        vocab_size=vocab_size,
        max_prompt_tokens=16,
        seed=seed,
        recompute_kv=recompute_kv,
    )


def make_decoder(*, seed: int = 0, **overrides: object) -> Decoder:
    """A random Llama with the tiny models' vocabulary, without the detour over files."""
    shape = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    decoder = Decoder(DecoderConfig.from_dict(shape | overrides))
    decoder.init_weights(torch.Generator().manual_seed(seed))
    return decoder


@torch.no_grad()
def recomputed_logits(decoder: Decoder, answers: Sequence[Trajectory]) -> list[Tensor]:
    """The logits [N, V] that predict each answer's tokens, from one packed training pass over all of them."""
    texts = [torch.cat([answer.prompt.token_ids, answer.response_ids]) for answer in answers]
    lengths = [len(text) for text in texts]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])
    hidden = decoder(torch.cat(texts), positions, PackedAttention(cu_seqlens, max(lengths)))
    logits = (hidden @ decoder.lm_head_weight.T).split(lengths)
    return [
        text_logits[len(answer.prompt.token_ids) - 1 : -1] for answer, text_logits in zip(answers, logits, strict=True)
    ]

"""Tiny random models for the built-in arithmetic task, made without transformers' models."""

from __future__ import annotations

from pathlib import Path

import torch

from titan_opd.data import load_tokenizer
from titan_opd.models import Decoder, DecoderConfig, save_decoder

VOCAB_SIZE = 17  # tokens of the task
SHAPE = {
    "vocab_size": 24,  # the rest is padding
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # ten times the usual: distributions far from uniform, so that mistakes show
    "eos_token_id": 1,
}
FAMILIES = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": False},
}


def make_decoder(family: str, *, seed: int, **shape: object) -> Decoder:
    """A random decoder: "llama" is tied, "qwen3" is not."""
    decoder = Decoder(DecoderConfig.from_dict(SHAPE | FAMILIES[family] | shape))
    decoder.init_weights(torch.Generator().manual_seed(seed))
    return decoder


def save_model(path: Path, family: str, *, seed: int, tokenizer: object = "arithmetic", **shape: object) -> Path:
    """Write a random model with its tokenizer into the folder `path` and return it."""
    save_decoder(make_decoder(family, seed=seed, **shape), path)
    (load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer).save_pretrained(path)
    return path

"""Tiny random models in Hugging Face format, made by transformers in a moment."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,  # ten times the usual: the logits differ enough for a mistake to show
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),  # not hidden_size / num_attention_heads = 12
}


def make_tiny_model(family: str = "llama", *, seed: int = 0, **overrides: object) -> transformers.PreTrainedModel:
    """A random causal language model of transformers, in float32, with every weight drawn: norms and biases too.

    Args:
        family: "llama", "qwen2" or "qwen3".
        seed: of the weights.
        overrides: keys of its config.json.
    """
    config_class, own = FAMILIES[family]
    config = config_class(**(SHAPE | own | overrides))
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            offset = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(offset, config.initializer_range, generator=generator)
    return model.eval()


def make_tiny_checkpoint(path: str | Path, family: str = "llama", *, seed: int = 0, **overrides: object) -> Path:
    """Write the model of `make_tiny_model` into the folder `path` and return it."""
    make_tiny_model(family, seed=seed, **overrides).save_pretrained(path)
    return Path(path)

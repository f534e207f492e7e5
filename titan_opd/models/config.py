"""`DecoderConfig`: the shape of a supported model, read from and written as Hugging Face's config.json.

What a config.json asks for and this decoder does not do is refused by name; nothing is ignored that would change the
model's output.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan_opd.models.keys import Keys
from titan_opd.models.rope import Llama3Scaling, read_rope


@dataclass(frozen=True)
class Family:
    """What tells the supported families apart.

    Attributes:
        architecture: Hugging Face's class, as in the `architectures` of config.json.
        qkv_bias: whether the query, key and value projections have a bias.
        qk_norm: whether each head's query and key pass an RMSNorm before the rotation.
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False


GENERATION_FILE = "generation_config.json"

FAMILIES: dict[str, Family] = {  # by the `model_type` of config.json
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
}


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder; names follow the field's usage, Hugging Face's names are in `from_dict` and `to_dict`.

    Attributes:
        family: key of `FAMILIES`.
        vocab_size: rows of the embedding; at least the number of the tokenizer's tokens.
        max_position_embeddings: the context length that the model was trained for.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how the frequencies are stretched; None leaves them as they are.
        initializer_range: standard deviation of a random initialisation.
        eos_token_ids: the ids that end a text; generation_config.json's where there is one, as in transformers.
        generation_config: the text of generation_config.json, which goes along with the weights as it is; empty: none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    generation_config: str = field(default="", compare=False, repr=False)

    @property
    def qkv_bias(self) -> bool:
        return FAMILIES[self.family].qkv_bias

    @property
    def qk_norm(self) -> bool:
        return FAMILIES[self.family].qk_norm

    @classmethod
    def from_directory(cls, path: str | Path) -> DecoderConfig:
        """Read `path`/config.json, and the end-of-text ids of generation_config.json where there is one.

        Raises:
            ValueError: the folder or the file is missing or unreadable, or asks for something unsupported.
        """
        directory = Path(path)
        if not os.path.isdir(directory):  # False for a name that no folder can have, too
            raise ValueError(
                f"model folder {str(path)!r} does not exist; nothing is downloaded: give the path of a local folder in "
                "Hugging Face format, with config.json and model.safetensors (or its shards and their index)"
            )
        values = read_json(directory / "config.json")
        generation_file = directory / GENERATION_FILE
        generation_text = ""
        if generation_file.exists():
            generation = read_json(generation_file)
            generation_text = generation_file.read_text(encoding="utf-8")
            if generation.get("eos_token_id") is not None:
                values["eos_token_id"] = generation["eos_token_id"]
        config = cls.from_dict(values, source=str(directory / "config.json"))
        return replace(config, generation_config=generation_text)

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, source: str = "config.json") -> DecoderConfig:
        """The configuration that a config.json's content describes, in the style of transformers 4 or 5.

        Args:
            values: the content.
            source: the file that errors name.

        Raises:
            ValueError: a key is missing or invalid, or asks for something unsupported.
        """
        keys = Keys(values, source)
        family = _family(keys)
        _refuse_unsupported(keys)
        num_heads = keys.integer("num_attention_heads")
        hidden_size = keys.integer("hidden_size")
        # Missing keys take transformers' defaults, except where these are the numbers of one particular model: Qwen's
        # key-value heads and Qwen3's head_dim are required.
        num_kv_heads = keys.integer("num_key_value_heads", num_heads if family == "llama" else None)
        if num_heads % num_kv_heads:
            raise keys.error("num_key_value_heads", f"must divide num_attention_heads = {num_heads}")
        if values.get("head_dim") is None and family != "qwen3" and hidden_size % num_heads:
            raise keys.error("hidden_size", f"must be divisible by num_attention_heads = {num_heads}, or give head_dim")
        head_dim = keys.integer("head_dim", hidden_size // num_heads if family != "qwen3" else None)
        if head_dim % 2:
            raise ValueError(f"{source}: head_dim = {head_dim} must be even: RoPE rotates pairs")
        max_position_embeddings = keys.integer("max_position_embeddings")
        rope_theta, rope_scaling = read_rope(keys, max_position_embeddings)
        return cls(
            family=family,
            vocab_size=keys.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size"),
            num_layers=keys.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            initializer_range=keys.number("initializer_range", 0.02),
            bos_token_id=keys.token_id("bos_token_id"),
            eos_token_ids=keys.token_ids("eos_token_id"),
            pad_token_id=keys.token_id("pad_token_id"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of a config.json that transformers loads.

        RoPE is written in the style of transformers 4 (`rope_theta`, `rope_scaling`): version 5 reads it too, while
        version 4 would overlook `rope_parameters` and rotate by the default base.
        """
        eos_token_id = list(self.eos_token_ids) if len(self.eos_token_ids) > 1 else next(iter(self.eos_token_ids), None)
        return {
            "architectures": [FAMILIES[self.family].architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling.to_dict() if self.rope_scaling else None,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": self.pad_token_id,
        }


def _family(keys: Keys) -> str:
    model_type = keys.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise keys.error("model_type", f"is not a supported architecture; supported: {', '.join(FAMILIES)}")
    architectures = keys.texts("architectures") or [FAMILIES[model_type].architecture]
    if FAMILIES[model_type].architecture not in architectures:
        raise keys.error(
            "architectures", f"has no {FAMILIES[model_type].architecture}: only causal language models are supported"
        )
    return model_type


def _refuse_unsupported(keys: Keys) -> None:
    """Raise a ValueError for the first key whose value would change the model in a way this decoder does not do."""
    values = keys.values
    if values.get("quantization_config") is not None:
        raise keys.error("quantization_config", "is not supported: give the model in bfloat16, float16 or float32")
    if (values.get("hidden_act") or "silu") != "silu":
        raise keys.error("hidden_act", "is not supported: the feed-forward layers use 'silu'")
    for key in ("attention_bias", "mlp_bias"):
        if values.get(key):
            raise keys.error(key, "is not supported: of the projections only Qwen2's query, key and value have a bias")
    if values.get("attention_dropout"):
        raise keys.error(
            "attention_dropout", "is not supported: the attention kernels run without dropout; set it to 0"
        )
    _refuse_sliding_window(keys)


def _refuse_sliding_window(keys: Keys) -> None:
    """Qwen's configurations carry a window that no layer uses; refuse only one that a layer does use."""
    values = keys.values
    layer_types = keys.texts("layer_types")
    if layer_types is not None:
        if any(layer_type != "full_attention" for layer_type in layer_types):
            raise keys.error("layer_types", "is not supported: every layer must be 'full_attention'")
        return
    # Without the key transformers takes a window of its own; null is none.
    has_window = values.get("sliding_window", "transformers' default") is not None
    if keys.flag("use_sliding_window") and has_window:
        first, num_layers = keys.count("max_window_layers", 0), keys.integer("num_hidden_layers")
        if first < num_layers:
            raise keys.error(
                "sliding_window",
                f"is in use from layer {first} of {num_layers} on (use_sliding_window is true); "
                "sliding-window attention is not supported",
            )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder, or a ValueError that names the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing; a model folder in Hugging Face format holds config.json and model.safetensors "
            "(or its shards and their index)"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # broken JSON, another encoding, nested too deeply
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds a {type(values).__name__}")
    return values

"""What has to be known of a model before vLLM runs it, whatever its architecture, and what cannot be run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

from titan_opd.models import DecoderConfig

_SMALLEST_HEAD = 32  # of vLLM's attention on a CPU


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model in Hugging Face format.

    Attributes:
        vocab_size: rows of the embedding.
        max_position_embeddings: longest text.
        num_heads, num_kv_heads, head_dim: of the attention.
        intermediate_size: columns of the feed-forward layers; of one expert, where there are several.
    """

    vocab_size: int
    max_position_embeddings: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    @classmethod
    def of(cls, model: DecoderConfig) -> ModelShape:
        """Of a decoder that this package has too."""
        return cls(**{name: getattr(model, name) for name in cls.__dataclass_fields__})

    @classmethod
    def from_directory(cls, folder: Path) -> ModelShape:
        """Of a model that only vLLM may have.

        Raises:
            ValueError: its config.json is missing, or of an architecture that transformers does not know.
        """
        try:
            text = AutoConfig.from_pretrained(folder).get_text_config()
        except (OSError, ValueError) as error:
            raise ValueError(f"{str(folder)!r} holds no model that can be read: {error}") from error
        num_heads = text.num_attention_heads
        return cls(
            vocab_size=text.vocab_size,
            max_position_embeddings=text.max_position_embeddings,
            num_heads=num_heads,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // num_heads,
            intermediate_size=getattr(text, "moe_intermediate_size", None) or text.intermediate_size,
        )


def check_model(model: ModelShape, dtype: str, option: str, *, on_cpu: bool) -> None:
    """Raise a ValueError when vLLM cannot run the model here.

    Args:
        model: its shape.
        dtype: "float32" or "bfloat16".
        option: what names the type, such as "rollout.dtype".
        on_cpu: whether it runs on a CPU.
    """
    if on_cpu and model.head_dim < _SMALLEST_HEAD:
        raise ValueError(
            f"the model's head_dim = {model.head_dim} is below {_SMALLEST_HEAD}, the smallest of vLLM's attention on a "
            "CPU; use engine = 'native' for it"
        )
    if on_cpu and dtype != "float32":
        raise ValueError(
            f"{option} = {dtype!r} crashes in vLLM's attention on CPUs with AMX, or gives wrong text there; set it to "
            "'float32', or use a GPU"
        )


def check_split(model: ModelShape, num_devices: int, option: str) -> None:
    """Raise a ValueError when vLLM cannot split the model over `num_devices`, which `option` asks for."""
    kv_heads = model.num_kv_heads
    for what, count in (
        ("attention heads", model.num_heads),
        ("key and value heads", max(kv_heads, num_devices) if num_devices % kv_heads == 0 else kv_heads),
        ("columns of the feed-forward layers", model.intermediate_size),
    ):
        if count % num_devices:
            raise ValueError(f"{option} = {num_devices} does not divide the model's {count} {what}; choose a divisor")

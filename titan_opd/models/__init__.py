"""One decoder for Llama, Qwen2/2.5 and Qwen3, with Hugging Face's names, files and numbers."""

from titan_opd.models.attention import Attention, PackedAttention, attention_backend
from titan_opd.models.checkpoint import (
    load_decoder,
    load_weights,
    read_weights,
    weight_shapes,
)
from titan_opd.models.config import DecoderConfig
from titan_opd.models.decoder import Decoder
from titan_opd.models.model_files import ModelFiles, save_checkpoint_files, save_decoder

__all__ = [
    "Attention",
    "Decoder",
    "DecoderConfig",
    "ModelFiles",
    "PackedAttention",
    "attention_backend",
    "load_decoder",
    "load_weights",
    "read_weights",
    "save_checkpoint_files",
    "save_decoder",
    "weight_shapes",
]

"""Prompts, the stream they form, and the packed batches that come out of their answers."""

from titan_opd.data.packing import pack
from titan_opd.data.prompts import load_prompts
from titan_opd.data.records import PackedBatch, Prompt, Sample, ScoredTrajectory, Trajectory
from titan_opd.data.stream import PromptStream
from titan_opd.data.tokenizers import check_tokenizer, compare_tokenizers, load_tokenizer, num_tokens, stop_ids

__all__ = [
    "PackedBatch",
    "Prompt",
    "PromptStream",
    "Sample",
    "ScoredTrajectory",
    "Trajectory",
    "check_tokenizer",
    "compare_tokenizers",
    "load_prompts",
    "load_tokenizer",
    "num_tokens",
    "pack",
    "stop_ids",
]

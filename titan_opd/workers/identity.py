"""What all roles of a run must have in common, as short digests that are compared when they meet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from titan_opd.channel import RunIdentity
from titan_opd.data import Prompt
from titan_opd.data.stream import prompts_digest
from titan_opd.models import DecoderConfig

_DIGEST_LENGTH = 32  # hexadecimal digits


def run_identity(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], student: DecoderConfig, teacher: Path | None
) -> RunIdentity:
    """What every worker must share.

    Args:
        tokenizer: the student's.
        prompts: the training prompts as they were read.
        student: its shape; the weights come from the trainer.
        teacher: the folder of its model; None without one.
    """
    models = {"rollout": _digest(json.dumps(asdict(student), sort_keys=True, default=str))}
    if teacher is not None:
        models["teacher"] = model_digest(teacher)
    return RunIdentity(
        vocabulary_digest=_digest(json.dumps(sorted(tokenizer.get_vocab().items()))),
        prompts_digest=prompts_digest(prompts)[:_DIGEST_LENGTH],
        model_digests=models,
    )


def model_digest(folder: Path) -> str:
    """Of a model on disk: its configuration, and the names and sizes of its files of weights."""
    sizes = sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    return _digest(json.dumps([config, sizes], sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]

"""What all roles of a run read from the same files: tokenizer, prompts, the student's shape."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from titan_opd.checkpoint import model_folder, resuming_from
from titan_opd.config import Config
from titan_opd.data import Prompt, PromptStream, check_tokenizer, load_prompts, load_tokenizer, num_tokens, stop_ids
from titan_opd.models import DecoderConfig


@dataclass(frozen=True)
class Common:
    """What all roles of a run read from the same files.

    Attributes:
        tokenizer: the student's.
        student: the shape of its model.
        stop_ids: tokens that end an answer.
        train_prompts: what the samples of the run ask.
        eval_prompts: all prompts of the evaluation file.
    """

    tokenizer: PreTrainedTokenizerBase
    student: DecoderConfig
    stop_ids: list[int]
    train_prompts: list[Prompt]
    eval_prompts: list[Prompt]

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer; rows of a vocabulary at or above it are padding."""
        return num_tokens(self.tokenizer)

    def stream(self, config: Config) -> PromptStream:
        """The training prompts as an endless stream of samples, from sample 0."""
        return PromptStream(
            self.train_prompts,
            shuffle=config.data.shuffle,
            seed=config.run.seed,
            samples_per_prompt=config.schedule.samples_per_prompt,
        )


def read_common(config: Config, *, checkpoint: Path | None = None) -> Common:
    """Read tokenizer, prompts and the student's shape.

    Args:
        config: what to read.
        checkpoint: the student's folder when a run goes on; None: as `config` says.

    Raises:
        ValueError: a missing or broken file, a tokenizer that does not fit the model.
    """
    folder = model_folder(config.student.path) if checkpoint is None else checkpoint
    with resuming_from(checkpoint):
        student = DecoderConfig.from_directory(folder)
        tokenizer = load_tokenizer(str(folder) if checkpoint is not None else config.student.tokenizer or str(folder))
    check_tokenizer(tokenizer, student.vocab_size, where=f"student.path = {config.student.path!r}")
    stops = stop_ids(tokenizer, student.eos_token_ids, config.rollout.sampling.stop_ids)
    train_prompts, eval_prompts = load_prompts(config.data, tokenizer, stops)
    return Common(tokenizer, student, stops, train_prompts, eval_prompts)

"""A model's answers to a run's prompts, as a file of prompts: the data of sequence-level distillation.

    {"id": "train.jsonl:1", "prompt": "347+85=", "response": "7+5=2c1;...#432", "answer": "432", "sampler": {...}}

`data.train` with the default column names reads it. Text, not tokens, is what is written: the model that wrote and the
student that learns from it may have different tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from titan_opd.checkpoint import model_folder, write_file
from titan_opd.config import Config
from titan_opd.data import (
    Prompt,
    Sample,
    Trajectory,
    check_tokenizer,
    load_prompts,
    load_tokenizer,
    num_tokens,
    stop_ids,
)
from titan_opd.models import load_decoder
from titan_opd.parallel import open_world
from titan_opd.rollout import NativeEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODELS = ("teacher", "student")


@dataclass(frozen=True)
class WrittenAnswers:
    """What became of the prompts.

    Attributes:
        written: lines of the file.
        unfinished: answers left out because they reached `max_new_tokens`; with a stop token at their end they would
            teach to break off.
        empty: answers left out because they have no text.
    """

    written: int
    unfinished: int
    empty: int

    def __str__(self) -> str:
        left_out = [
            f"{count} {reason}"
            for count, reason in (
                (self.unfinished, "without a stop token within rollout.sampling.max_new_tokens"),
                (self.empty, "without a text"),
            )
            if count
        ]
        return f"{self.written} answers" + (f"; left out: {', '.join(left_out)}" if left_out else "")


def write_answers(config: Config, path: Path, *, model: str) -> WrittenAnswers:
    """Answer each training prompt once, in the order of the data, and write the answers to a new JSONL file.

    Args:
        config: the prompts, the models' folders, `rollout.sampling` and `run.seed`.
        path: the file, which ends in .jsonl; it appears when all answers are there.
        model: "teacher" or "student", who answers.

    Raises:
        ValueError: the file is there already, the model or the prompts cannot be used, or another engine than the
            native one is asked for.
    """
    if path.suffix != ".jsonl":
        raise ValueError(f"{str(path)!r}: the answers are JSON lines, which data.train reads from .jsonl files only")
    if path.exists():
        raise ValueError(f"{str(path)!r} exists already; name a new file, or delete that one")
    _check_engine(config, model)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    folder, tokenizer_folder = _folders(config, model)
    tokenizer = load_tokenizer(tokenizer_folder)
    dtype = getattr(torch, config.teacher.dtype if model == "teacher" else config.rollout.dtype)
    with open_world() as world:
        decoder = load_decoder(folder, dtype=dtype, device=world.device)
        check_tokenizer(tokenizer, decoder.config.vocab_size, where=f"{model}.path = {str(folder)!r}")
        stops = stop_ids(tokenizer, decoder.config.eos_token_ids, config.rollout.sampling.stop_ids)
        prompts, _ = load_prompts(config.data, tokenizer, stops)
        engine = NativeEngine(
            decoder.requires_grad_(False),
            config=config.rollout,
            stop_ids=stops,
            vocab_size=num_tokens(tokenizer),
            max_prompt_tokens=config.data.max_prompt_tokens,
            seed=config.run.seed,
        )
        samples = [Sample(number, epoch=0, repeat=0, prompt=prompt) for number, prompt in enumerate(prompts)]
        answers = engine.generate(samples, config.rollout.sampling)
    sampler = {"model": str(folder), "seed": config.run.seed, **asdict(config.rollout.sampling)}
    finished = [answer for answer in answers if answer.finish_reason == "stop"]
    rows = list(_rows(finished, tokenizer, sampler))
    if not rows:
        raise ValueError(
            f"none of the {len(answers)} answers ended within rollout.sampling.max_new_tokens = "
            f"{config.rollout.sampling.max_new_tokens} and has a text; raise that, or use a model that answers"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return WrittenAnswers(len(rows), unfinished=len(answers) - len(finished), empty=len(finished) - len(rows))


def _check_engine(config: Config, model: str) -> None:
    name = "teacher" if model == "teacher" else "rollout"
    if getattr(config, name).engine == "vllm":
        raise ValueError(
            f"{name}.engine = 'vllm': the native engine alone writes answers to a file; add --{name}.engine native"
        )
    if config.rollout.quantization != "none":
        raise ValueError(
            f"rollout.quantization = {config.rollout.quantization!r}: answers are written to a file with the weights "
            "as they are; add --rollout.quantization none"
        )


def _folders(config: Config, model: str) -> tuple[Path, str]:
    """The folder of the model's weights, and that of its tokenizer."""
    if model == "teacher":
        if not config.teacher.path:
            raise ValueError("teacher.path is missing: the folder of the model that answers")
        folder = model_folder(config.teacher.path)
        return folder, str(folder)
    assert model == "student", model
    if config.student.initialize == "random":
        raise ValueError(
            f"student.initialize = 'random' would write with random weights, not with those in student.path = "
            f"{config.student.path!r}; add --student.initialize checkpoint"
        )
    folder = model_folder(config.student.path)
    return folder, config.student.tokenizer or str(folder)


def _rows(
    answers: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase, sampler: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for answer in answers:
        text = tokenizer.decode(answer.response_ids, skip_special_tokens=True)
        if text.strip():
            yield {**_question(answer.prompt), "response": text, "sampler": sampler}


def _question(prompt: Prompt) -> dict[str, Any]:
    known = {} if prompt.answer is None else {"answer": prompt.answer}
    return {"id": prompt.id, "prompt": prompt.question, **known}

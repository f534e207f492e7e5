"""`load_prompts`: the training and evaluation prompts that a configuration names."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from titan_opd.config.schema import DataConfig
from titan_opd.config.spelling import nearest
from titan_opd.data.arithmetic import VOCABULARY, arithmetic_prompts
from titan_opd.data.files import Row, read_rows
from titan_opd.data.records import Prompt
from titan_opd.data.templates import Question, Template, make_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def load_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int] = ()
) -> tuple[list[Prompt], list[Prompt]]:
    """(training prompts, evaluation prompts), in the order of their files, each with at least one token.

    Args:
        config: which data, columns and template.
        tokenizer: the student's.
        stop_ids: what ends an answer beside the tokenizer's eos token; an expert's response ends with exactly one.

    Raises:
        ValueError: what is wrong with a file, naming the file, the row, the column and the way out.
    """
    if config.task == "arithmetic":
        return _load_arithmetic(config, tokenizer)
    template = make_template(config, tokenizer, stop_ids)
    train = _load_file(config.train, "data.train", config, template)
    return train, _load_file(config.evaluation, "data.evaluation", config, template) if config.evaluation else []


def _load_arithmetic(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Prompt], list[Prompt]]:
    if tokenizer.get_vocab() != VOCABULARY:
        raise ValueError(
            f"data.task = 'arithmetic' has a tokenizer of its own ({len(VOCABULARY)} tokens), and the student's is "
            "another; set student.tokenizer = 'arithmetic' with a model made for it, or data.task = 'files'"
        )
    longest = 2 * config.arithmetic.max_digits + len("+=")
    if longest > config.max_prompt_tokens:
        raise ValueError(
            f"data.arithmetic.max_digits = {config.arithmetic.max_digits} makes prompts of {longest} tokens, more than "
            f"data.max_prompt_tokens = {config.max_prompt_tokens}; raise that"
        )
    return arithmetic_prompts(config.arithmetic)


def _load_file(name: str, key: str, config: DataConfig, template: Template) -> list[Prompt]:
    path = Path(name)
    rows = read_rows(path, key)
    _check_columns(path, rows, config)
    prompts: list[Prompt] = []
    row_of_id: dict[str, int] = {}
    num_skipped = 0
    for row in rows:
        try:
            prompt = _build_prompt(path, row, config, template)
        except ValueError as error:
            raise ValueError(f"{path}:{row.number}: {error}") from error
        if prompt is None:
            num_skipped += 1
            continue
        if prompt.id in row_of_id:
            raise ValueError(
                f"{path}:{row.number}: id {prompt.id!r} is also that of row {row_of_id[prompt.id]}; make the column "
                "'id' unique, or rename it: then file and row are the id"
            )
        row_of_id[prompt.id] = row.number
        prompts.append(prompt)
    if num_skipped:
        limit = f"data.max_prompt_tokens = {config.max_prompt_tokens}"
        if not prompts:
            raise ValueError(f"{path}: all {len(rows)} prompts are longer than {limit}; raise that")
        logger.warning("%s: skipped %d of %d prompts, longer than %s", path, num_skipped, len(rows), limit)
    return prompts


def _check_columns(path: Path, rows: list[Row], config: DataConfig) -> None:
    """A column that may be absent must be there when the user named it: a misspelt name would grade nothing."""
    for option in ("answer_field", "response_field"):
        column = getattr(config, option)
        if column != getattr(DataConfig, option) and not any(column in row.columns for row in rows):
            raise ValueError(f"{path}: {_no_column(column, option, rows[0])}")


def _build_prompt(path: Path, row: Row, config: DataConfig, template: Template) -> Prompt | None:
    """The prompt of a row; None when it is too long and such prompts are to be skipped."""
    question = _question(row, config)
    prompt_ids = template.prompt_ids(question)
    if not prompt_ids:
        raise ValueError("the prompt has no token")
    if len(prompt_ids) > config.max_prompt_tokens:
        if config.overlong == "skip":
            return None
        raise ValueError(
            f"the prompt has {len(prompt_ids)} tokens with its template, more than data.max_prompt_tokens = "
            f"{config.max_prompt_tokens}; raise that, or set data.overlong = 'skip'"
        )
    response = _optional(row, config.response_field, "response_field", str)
    answer = _optional(row, config.answer_field, "answer_field", str, int)
    identity = _optional(row, "id", "", str, int)
    used = {config.prompt_field, config.answer_field, config.response_field, "id"}
    return Prompt(
        id=f"{path.name}:{row.number}" if identity is None else str(identity),
        token_ids=torch.tensor(prompt_ids, dtype=torch.int64),
        question=question,
        answer=None if answer is None else str(answer),
        response_ids=None if response is None else torch.tensor(template.response_ids(question, response)),
        metadata={column: value for column, value in row.columns.items() if column not in used},
    )


def _question(row: Row, config: DataConfig) -> Question:
    column = config.prompt_field
    if column not in row.columns:
        raise ValueError(_no_column(column, "prompt_field", row))
    question = row.columns[column]
    if isinstance(question, str):
        if not question.strip():
            raise ValueError(f"column {column!r} (data.prompt_field) is empty; remove the row or write its question")
        return question
    if isinstance(question, list):
        return _messages(column, question)
    raise ValueError(
        f"column {column!r} (data.prompt_field) must be a text or a list of chat messages, it is "
        f"{type(question).__name__}"
    )


def _messages(column: str, messages: list[Any]) -> list[dict[str, Any]]:
    for i, message in enumerate(messages):
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        ):
            raise ValueError(
                f"{column}[{i}] (data.prompt_field) must be a chat message with the texts 'role' and 'content', it is "
                f"{str(message)[:60]!r}"
            )
    if not messages or messages[-1]["role"] == "assistant" or not messages[-1]["content"].strip():
        raise ValueError(
            f"column {column!r} (data.prompt_field) must end with a message to answer: one with some content that is "
            "not the assistant's own"
        )
    return messages


def _optional(row: Row, column: str, option: str, *types: type) -> Any:
    """A value of one of the types; None when the row has none."""
    value = row.columns.get(column)
    named = f"column {column!r}" + (f" (data.{option})" if option else "")
    if value is None:
        return None
    if not isinstance(value, types) or isinstance(value, bool):
        allowed = " or ".join(kind.__name__ for kind in types)
        raise ValueError(f"{named} must be of type {allowed}, it is {type(value).__name__}: {str(value)[:60]!r}")
    if isinstance(value, str) and not value.strip():
        raise ValueError(f"{named} is an empty text; leave the column out of the row, or use null, if there is none")
    return value


def _no_column(column: str, option: str, row: Row) -> str:
    present = ", ".join(sorted(row.columns))
    return (
        f"there is no column {column!r} (data.{option}); the columns are {present}{nearest(column, row.columns)}"
        f"; set data.{option} to the right one"
    )

"""Tokenizers: from a local folder, checked against the model and against the teacher's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from titan_opd.data.arithmetic import arithmetic_tokenizer
from titan_opd.errors import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SHOWN = 3  # differences that an error names


def load_tokenizer(path_or_name: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a local folder, or the built-in one named 'arithmetic'. Nothing is ever downloaded.

    Raises:
        ValueError: when the folder, or the tokenizer's files in it, are missing or cannot be read.
    """
    if path_or_name == "arithmetic":
        return arithmetic_tokenizer()
    folder = Path(path_or_name)
    if not os.path.isdir(folder):  # False for a name that no folder can have, too
        raise ValueError(
            f"no tokenizer folder {path_or_name!r}; give a local folder in Hugging Face format (nothing is "
            "downloaded), or 'arithmetic' for the built-in tokenizer"
        )
    if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        raise ValueError(
            f"folder {path_or_name!r} has no tokenizer: none of {', '.join(_VOCABULARY_FILES)} is there; copy the "
            "tokenizer's files into it or name their folder in student.tokenizer"
        )
    from transformers import AutoTokenizer  # seconds to import: only where it is used

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the readers of tokenizer files raise a bare Exception too
        raise ValueError(f"cannot read the tokenizer in {path_or_name!r}: {one_line(error)}") from error


def num_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest token id. Rows of an embedding from here on belong to no token."""
    return max(tokenizer.get_vocab().values()) + 1


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_rows: int, where: str) -> None:
    """Raise a ValueError when the tokenizer has ids that the model's embedding has no row for.

    Args:
        tokenizer: what makes the ids.
        vocab_rows: rows of the model's embedding.
        where: what the error calls the model, such as "student.path = 'models/tiny'".
    """
    tokens = num_tokens(tokenizer)
    if tokens > vocab_rows:
        raise ValueError(
            f"{where}: the tokenizer has {tokens} tokens and the model's embedding only {vocab_rows} rows; use the "
            "tokenizer that the model was trained with, or enlarge the embedding"
        )


def compare_tokenizers(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """Raise a ValueError unless both give every id the same token: a teacher's scores are compared by id.

    Rows of the embeddings beyond the tokens may differ in number; they are masked.
    """
    student_tokens = {i: token for token, i in student.get_vocab().items()}
    teacher_tokens = {i: token for token, i in teacher.get_vocab().items()}
    different = [
        i
        for i in sorted(student_tokens.keys() | teacher_tokens.keys())
        if student_tokens.get(i) != teacher_tokens.get(i)
    ]
    if not different:
        return
    shown = "; ".join(
        f"id {i} is {_name(student_tokens, i)} for the student and {_name(teacher_tokens, i)} for the teacher"
        for i in different[:_SHOWN]
    )
    raise ValueError(
        f"student and teacher have different tokenizers ({len(student_tokens)} and {len(teacher_tokens)} tokens, "
        f"{len(different)} ids differ): {shown}; choose a teacher of the student's family, or, where one set of tokens "
        "contains the other, give the student the larger one by student.tokenizer"
    )


def _name(tokens: dict[int, str], i: int) -> str:
    return repr(tokens[i]) if i in tokens else "no token"


def stop_ids(
    tokenizer: PreTrainedTokenizerBase, model_eos_ids: Iterable[int] = (), extra: Iterable[int] = ()
) -> tuple[int, ...]:
    """The ids that end an answer, ascending: the tokenizer's eos, the model's, and what the user added.

    Args:
        tokenizer: its eos token ends an answer.
        model_eos_ids: `eos_token_id` of the model's config.json and generation_config.json.
        extra: `sampling.stop_ids`.

    Raises:
        ValueError: when there is none, or one is no token.
    """
    sources = {
        "the tokenizer's eos token": () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,),
        "eos_token_id of the model's config": tuple(model_eos_ids),
        "sampling.stop_ids": tuple(extra),
    }
    tokens = num_tokens(tokenizer)
    for source, ids in sources.items():
        for i in ids:
            if not 0 <= i < tokens:
                raise ValueError(
                    f"{source}: stop id {i} is none of the tokenizer's {tokens} tokens, so it can never be written; "
                    "correct it, or use the model's own tokenizer"
                )
    union = sorted({i for ids in sources.values() for i in ids})
    if not union:
        raise ValueError(
            "neither the tokenizer nor the model's config names an eos token: answers would never end; "
            "set sampling.stop_ids"
        )
    return tuple(union)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text as it stands: special tokens written in it are recognised, none is added.

    Raises:
        ValueError: the tokenizer has no token for something in the text.
    """
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # the tokenizers library raises bare ones
        raise ValueError(
            f"the tokenizer cannot write the text {text[:40]!r} ({error}); correct the text or data.template, or use "
            "another tokenizer"
        ) from error


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts a BOS before a plain text."""
    return tokenizer.bos_token_id is not None and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]

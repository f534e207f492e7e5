"""The built-in task: sums with the carries written out.

    prompt    347+85=
    response  7+5=2c1;4+8+1=3c1;3+0+1=4c0;#432<eos>

One step per column, from the units: the digits of both summands (0 where the shorter one has none), the carry that
came in (from the second column on), the digit that is written and the carry that goes out. After `#` stands the sum.
A character is a token.

Problems are generated, never stored. Which problems are for evaluation depends on the two summands alone, so no seed
and no count can move an evaluation problem into a training set. Within a set no problem comes twice, and a longer set
begins with the shorter one of the same seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from titan_opd.config.schema import ArithmeticConfig
from titan_opd.data.records import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "0123456789+=c;#"
VOCABULARY = {token: i for i, token in enumerate((PAD, EOS, *CHARACTERS))}

_EVALUATION_SHARE = 16  # one problem in this many is for evaluation
_BLOCK = 1 << 16  # problems drawn at a time; fixed, so that a set's beginning does not depend on its size
_BASE = 10**9  # above every summand


def arithmetic_tokenizer() -> PreTrainedTokenizerBase:
    """The task's tokenizer: one token a character, `<pad>` and `<eos>`; any other character is an error."""
    from tokenizers import (
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )  # seconds to import: only where it is used
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def worked_sum(first: int, second: int) -> str:
    """The expert's response to `first+second=`, without the stop token."""
    digits, others = str(first)[::-1], str(second)[::-1]
    steps, carry = [], 0
    for i in range(max(len(digits), len(others))):
        digit, other = digits[i] if i < len(digits) else "0", others[i] if i < len(others) else "0"
        carry_in = f"+{carry}" if i else ""
        carry, written = divmod(int(digit) + int(other) + carry, 10)
        steps.append(f"{digit}+{other}{carry_in}={written}c{carry};")
    return f"{''.join(steps)}#{first + second}"


def arithmetic_prompts(config: ArithmeticConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Training and evaluation prompts, each with its answer and the expert's response.

    Raises:
        ValueError: when more problems are asked for than can be drawn without repeating one.
    """
    train_NA = _draw_problems(config, evaluation=False, count=config.skip_train + config.num_train)
    evaluation_NA = _draw_problems(config, evaluation=True, count=config.num_eval)
    train = _build_prompts(train_NA[config.skip_train :], "train", config.skip_train)
    return train, _build_prompts(evaluation_NA, "eval", 0)


def _draw_problems(config: ArithmeticConfig, *, evaluation: bool, count: int) -> np.ndarray:
    """[N, A]: N = `count` different problems of A = 2 summands each.

    Each summand's number of digits is uniform, as long as there are problems left with these numbers.
    """
    num_numbers = 10**config.max_digits - (0 if config.min_digits == 1 else 10 ** (config.min_digits - 1))
    share = 1 / _EVALUATION_SHARE if evaluation else 1 - 1 / _EVALUATION_SHARE
    limit = int(num_numbers**2 * share / 2)  # beyond half of them, drawing and throwing away repeats gets slow
    if count > limit:
        option = "num_eval" if evaluation else "skip_train + data.arithmetic.num_train"
        raise ValueError(
            f"data.arithmetic.{option} = {count} is more than the {limit} different problems that may be drawn with "
            f"min_digits = {config.min_digits} and max_digits = {config.max_digits}; raise max_digits or ask for fewer"
        )
    generator = np.random.Generator(np.random.PCG64([config.seed, int(evaluation)]))
    keys_N = np.empty(0, dtype=np.int64)  # both summands in one number: first * _BASE + second
    while len(keys_N) < count:
        lengths_NA = generator.integers(config.min_digits, config.max_digits + 1, size=(_BLOCK, 2))
        drawn_NA = generator.integers(np.where(lengths_NA == 1, 0, 10 ** (lengths_NA - 1)), 10**lengths_NA)
        drawn_NA = drawn_NA[_is_for_evaluation(drawn_NA) == evaluation]
        keys_N = np.concatenate((keys_N, drawn_NA @ np.array([_BASE, 1])))
        _, first_seen = np.unique(keys_N, return_index=True)
        keys_N = keys_N[np.sort(first_seen)]
    return np.stack(np.divmod(keys_N[:count], _BASE), axis=1)


def _is_for_evaluation(problems_NA: np.ndarray) -> np.ndarray:
    """[N] bool, from a hash of the unordered summands: a+b and b+a are in the same set."""
    mixed = (problems_NA.min(axis=1) * _BASE + problems_NA.max(axis=1)).astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the finaliser of splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) % np.uint64(_EVALUATION_SHARE) == 0


def _build_prompts(problems_NA: np.ndarray, name: str, first_number: int) -> list[Prompt]:
    problems = problems_NA.tolist()
    questions = [f"{first}+{second}=" for first, second in problems]
    questions_ids = _encode(questions)
    responses_ids = _encode([worked_sum(first, second) + _END for first, second in problems])
    return [
        Prompt(
            id=f"arithmetic-{name}:{first_number + i}",
            token_ids=question_ids,
            question=question,
            answer=str(first + second),
            response_ids=response_ids,
        )
        for i, ((first, second), question, question_ids, response_ids) in enumerate(
            zip(problems, questions, questions_ids, responses_ids, strict=True)
        )
    ]


_END = "\n"  # one byte that stands for <eos> while texts are encoded
_ID_OF_BYTE = np.full(128, -1, dtype=np.int64)
for _character in CHARACTERS:
    _ID_OF_BYTE[ord(_character)] = VOCABULARY[_character]
_ID_OF_BYTE[ord(_END)] = VOCABULARY[EOS]


def _encode(texts: list[str]) -> list[Tensor]:
    """What `arithmetic_tokenizer` says, all texts at once: 100,000 problems must not delay a start."""
    ids = torch.from_numpy(_ID_OF_BYTE[np.frombuffer("".join(texts).encode(), dtype=np.uint8)])
    # Clones, because a view would carry the whole storage along wherever its prompt is saved or sent.
    return [ids_N.clone() for ids_N in ids.split([len(text) for text in texts])]

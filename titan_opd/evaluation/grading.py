"""Graders: is a response's final answer the reference's?"""

from __future__ import annotations

from collections.abc import Callable

Grader = Callable[[str, str], bool]  # (response, reference) -> whether the response is right

_MARKER = "#"


def final_answer(text: str) -> str:
    """What a text gives as its answer: the rest of the line after the last `#`, or the whole text when there is none.

    So a sum's `...;#432` and a GSM8K solution's `#### 72` end in 432 and 72. White space around it does not count.
    """
    if _MARKER not in text:
        return text.strip()
    after = text.rpartition(_MARKER)[2].strip(" \t")
    return after.partition("\n")[0].strip()


def grade_exact(response: str, reference: str) -> bool:
    """Whether both have the same final answer, character by character.

    The same rule is applied to both, so a reference may be a bare answer or a whole worked solution. A response
    without any final answer is wrong.
    """
    answer = final_answer(response)
    return bool(answer) and answer == final_answer(reference)


GRADERS: dict[str, Grader] = {"exact": grade_exact}  # by the value of `evaluation.grader`

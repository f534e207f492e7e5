"""Graders: is a response's final answer the reference's?"""

from __future__ import annotations

import re
from collections.abc import Callable

Grader = Callable[[str, str], bool]  # (response, reference) -> whether the response is right

_MARKER = "#"
_GROUPED_NUMBER = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


def final_answer(text: str) -> str:
    """What a text gives as its answer: the rest of the line after the last `#`, or the whole text when there is none.

    So a sum's `...;#432` and a GSM8K solution's `#### 1,080` end in 432 and 1080: white space around an answer, and
    commas between the thousands of a number, do not count.
    """
    answer = text.rpartition(_MARKER)[2].partition("\n")[0].strip() if _MARKER in text else text.strip()
    return answer.replace(",", "") if _GROUPED_NUMBER.fullmatch(answer) else answer


def grade_exact(response: str, reference: str) -> bool:
    """Whether both have the same final answer, character by character.

    The same rule is applied to both, so a reference may be a bare answer or a whole worked solution. A response
    without any final answer is wrong.
    """
    answer = final_answer(response)
    return bool(answer) and answer == final_answer(reference)


GRADERS: dict[str, Grader] = {"exact": grade_exact}  # by the value of `evaluation.grader`

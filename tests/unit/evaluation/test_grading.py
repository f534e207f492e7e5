from __future__ import annotations

import pytest

from titan_opd.evaluation import GRADERS, final_answer, grade_exact


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7+5=2c1;4+8+1=3c1;3+0+1=4c0;#432", "432"),
        ("48+24 = 72 clips altogether.\n#### 72", "72"),
        ("# Solution\nfirst #5, no: #6\nThat is all.", "6"),
        ("####72", "72"),
        ("  72\n", "72"),
        ("it is 72", "it is 72"),
        ("#### 1,080", "1080"),
        ("-2,520,000.5", "-2520000.5"),
        ("(1,200)", "(1,200)"),
        ("1,20", "1,20"),
        ("72 #", ""),
        ("72 #\n5", ""),
        ("", ""),
    ],
)
def test_the_final_answer_of_a_text(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("response", "reference", "correct"),
    [
        ("2+2=4c0;#4", "4", True),
        ("2+2=4c0;#4", "So 2+2 = 4.\n#### 4", True),
        ("4", "#### 4", True),
        ("2+2=4c0;#44", "4", False),
        ("2+2=4c0;", "4", False),
        ("2+2=4c0;#", "4", False),
        ("", "", False),
        ("#04", "4", False),
    ],
)
def test_exact_compares_final_answers(response, reference, correct):
    assert grade_exact(response, reference) is correct
    assert GRADERS["exact"] is grade_exact

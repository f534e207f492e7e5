from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_opd.config.schema import ArithmeticConfig
from titan_opd.data.arithmetic import arithmetic_prompts, arithmetic_tokenizer, worked_sum

TOKENIZER = arithmetic_tokenizer()


def question(prompt):
    return TOKENIZER.decode(prompt.token_ids)


def questions(prompts):
    return [question(prompt) for prompt in prompts]


def make(**options):
    return arithmetic_prompts(ArithmeticConfig(**{"num_train": 300, "num_eval": 20, **options}))


def test_the_carries_are_written_out():
    assert worked_sum(347, 85) == "7+5=2c1;4+8+1=3c1;3+0+1=4c0;#432"
    assert worked_sum(5, 950) == "5+0=5c0;0+5+0=5c0;0+9+0=9c0;#955"
    assert worked_sum(99, 1) == "9+1=0c1;9+0+1=0c1;#100"


@given(st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1))
def test_the_steps_lead_to_the_sum(first, second):
    *steps, result = worked_sum(first, second).split(";")
    digits, carry = "", "0"
    for step, (a, b) in zip(steps, zip(reversed(f"{first:09}"), reversed(f"{second:09}"), strict=True), strict=False):
        left, right = step.split("=")
        assert left.split("+")[:2] == [a, b]
        assert left.split("+")[2:] == ([carry] if digits else [])
        written, carry = right.split("c")
        assert sum(int(term) for term in left.split("+")) == int(carry) * 10 + int(written)
        digits = written + digits
    assert int(carry + digits) == first + second
    assert result == f"#{first + second}"


def test_prompts_carry_question_answer_and_response():
    train, evaluation = make()
    for prompt in [*train, *evaluation]:
        first, second = (int(number) for number in re.fullmatch(r"(\d+)\+(\d+)=", question(prompt)).groups())
        assert prompt.answer == str(first + second)
        assert TOKENIZER.decode(prompt.response_ids) == worked_sum(first, second) + "<eos>"
        assert prompt.token_ids.tolist() == TOKENIZER.encode(f"{first}+{second}=")
        assert prompt.token_ids.dtype == prompt.response_ids.dtype == torch.int64
        assert len(str(first)) in (2, 3)
    assert len({len(prompt.response_ids) for prompt in train}) >= 3
    assert len({prompt.id for prompt in [*train, *evaluation]}) == 320


def test_no_problem_comes_twice_and_evaluation_is_kept_apart_whatever_the_seed():
    train, _ = make(num_train=20_000)
    _, evaluation = make(num_eval=2_000, seed=1)
    assert len(set(questions(train))) == 20_000
    assert len(set(questions(evaluation))) == 2_000
    both_orders = {frozenset(text.strip("=").split("+")) for text in questions(train)}
    assert both_orders.isdisjoint(frozenset(text.strip("=").split("+")) for text in questions(evaluation))


def test_sets_depend_on_the_seed_alone_and_nest():
    train, evaluation = make()
    assert questions(train) != questions(make(seed=1)[0])
    assert questions(evaluation) != questions(make(seed=1)[1])
    longer_train, longer_evaluation = make(num_train=1_000, num_eval=70)
    assert questions(longer_train)[:300] == questions(train)
    assert questions(longer_evaluation)[:20] == questions(evaluation)
    rest, same_evaluation = make(num_train=700, skip_train=300)
    assert questions(rest) == questions(longer_train)[300:]
    assert [prompt.id for prompt in rest] == [prompt.id for prompt in longer_train[300:]]
    assert questions(same_evaluation) == questions(evaluation)


def test_the_problems_stay_the_same_in_every_release():
    assert questions(make()[0])[:3] == ["615+845=", "62+74=", "20+783="]
    assert questions(make()[1])[:3] == ["40+92=", "307+358=", "723+987="]


@pytest.mark.parametrize(("min_digits", "max_digits"), [(1, 1), (1, 2), (2, 2)])
def test_small_ranges_give_half_of_their_problems_and_refuse_more(min_digits, max_digits):
    digits = {"min_digits": min_digits, "max_digits": max_digits}
    num_problems = (10**max_digits - (0 if min_digits == 1 else 10 ** (min_digits - 1))) ** 2
    num_train, num_eval = num_problems * 15 // 32, num_problems // 32
    train, evaluation = make(**digits, num_train=num_train, num_eval=num_eval)
    assert len(set(questions(train))) == num_train
    assert len(set(questions(evaluation))) == num_eval
    with pytest.raises(ValueError, match=rf"num_train = {num_train + 1} is more than the {num_train} different"):
        make(**digits, num_train=num_train - 9, skip_train=10, num_eval=1)
    with pytest.raises(ValueError, match=rf"data.arithmetic.num_eval = {num_eval + 1} .*raise max_digits"):
        make(**digits, num_train=1, num_eval=num_eval + 1)


def test_nine_digits():
    (prompt, *_), _ = make(min_digits=9, max_digits=9)
    assert re.fullmatch(r"\d{9}\+\d{9}=", question(prompt))

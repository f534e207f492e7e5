from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.make import make_scored
from titan_opd.data import ScoredTrajectory, pack
from titan_opd.losses import TeacherScores

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=0, max_size=12)


def numbered(lengths):
    """Answers whose tokens all differ, so that a misplaced one shows; versions are the answers' numbers."""
    scored, token = [], 0
    for number, (prompt_length, response_length) in enumerate(lengths):
        prompt_ids = range(token, token + prompt_length)
        response_ids = range(token + prompt_length, token + prompt_length + response_length)
        token += prompt_length + response_length
        scored.append(make_scored(prompt_ids, response_ids, name=f"p{number}", number=number, version=number))
    return scored


def sequences(batch):
    """(input tokens, answer's version, predicted tokens, tokens at the loss positions) of each packed sequence."""
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        rows = (batch.loss_positions >= start) & (batch.loss_positions < end)
        at = batch.loss_positions[rows]
        assert batch.positions[start:end].tolist() == list(range(end - start))
        yield (
            batch.input_ids[start:end].tolist(),
            set(batch.policy_versions[rows].tolist()),
            batch.scores.labels[rows].tolist(),
            batch.input_ids[at].tolist(),
        )


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(0, 40))
def test_every_response_token_has_one_row_and_the_budget_holds(lengths, slack):
    scored = numbered(lengths)
    budget = max([prompt + response - 1 for prompt, response in lengths], default=1) + slack
    seen = []
    for batch in pack(scored, budget):
        assert 0 < len(batch.input_ids) <= budget
        assert batch.cu_seqlens[-1] == len(batch.input_ids) == len(batch.positions)
        assert batch.max_seqlen == (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).max()
        assert len(batch.loss_positions) == len(batch.scores.labels) == len(batch.token_weights)
        assert batch.token_weights.eq(1).all()
        for inputs, versions, labels, at_loss in sequences(batch):
            (number,) = versions
            seen.append(number)
            trajectory = scored[number].trajectory
            prompt_ids, response_ids = trajectory.prompt.token_ids.tolist(), trajectory.response_ids.tolist()
            assert labels == response_ids
            assert inputs == prompt_ids + response_ids[:-1]
            assert at_loss == [prompt_ids[-1], *response_ids[:-1]]  # the token before the one that is predicted
    assert sorted(seen) == [number for number, (_, response) in enumerate(lengths) if response]


@settings(max_examples=50, deadline=None)
@given(LENGTHS.filter(len))
def test_packing_is_good_and_deterministic(lengths):
    scored = numbered(lengths)
    inputs = [prompt + response - 1 for prompt, response in lengths if response]
    batches = pack(scored, 20)
    assert len(batches) <= max(1, 2 * sum(inputs) / 20)  # no two half-empty micro-batches
    again = pack(scored, 20)
    assert [batch.input_ids.tolist() for batch in batches] == [batch.input_ids.tolist() for batch in again]


def test_answers_of_no_token_and_of_one():
    assert pack([make_scored([1, 2], [])], 8) == []
    (batch,) = pack([make_scored([1, 2], []), make_scored([3, 4], [5])], 8)
    assert batch.input_ids.tolist() == [3, 4]
    assert batch.loss_positions.tolist() == [1]
    assert batch.scores.labels.tolist() == [5]


def test_a_sequence_above_the_budget_names_prompt_size_and_option():
    long = make_scored(range(6), range(5), name="gsm8k.jsonl:7")
    assert len(pack([long], 10)) == 1
    with pytest.raises(ValueError, match=r"'gsm8k.jsonl:7' .* 10 input tokens.* training.tokens_per_microbatch = 9; "):
        pack([long], 9)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="'p' has no token"):
        pack([make_scored([], [1])], 8)


def score_rows(num_rows, width, *, valid=None, first=0.0):
    """Scores whose numbers all differ; column and row can be read off them."""
    values = first + torch.arange(num_rows * width, dtype=torch.float32).view(num_rows, width)
    return TeacherScores(
        ids=values.long(),
        logprobs=-values - 1,
        tail_logprobs=-values[:, 0] - 2,
        behavior_logprobs=-values - 3,
        proximal_logprobs=-values - 4,
        behavior_support=values.long(),
        valid=valid,
        hidden=values.repeat(1, 3)[:, :3],
        labels=values[:, 0].long(),
    )


def test_ragged_candidates_are_padded_and_every_field_is_carried():
    narrow, wide = score_rows(2, 1), score_rows(3, 4, first=100.0)
    head = torch.randn(7, 3)
    narrow, wide = (dataclasses.replace(scores, lm_head_weight=head) for scores in (narrow, wide))
    (batch,) = pack([make_scored([1], [2, 3], narrow), make_scored([4], [5, 6, 7], wide)], 64)
    scores = batch.scores
    assert scores.lm_head_weight is head
    assert scores.valid.tolist() == [[True, False, False, False]] * 2 + [[True] * 4] * 3
    for name, filler in {"ids": -1, "logprobs": 0, "behavior_logprobs": 0, "proximal_logprobs": 0}.items():
        packed = getattr(scores, name)
        assert torch.equal(packed[:2, :1], getattr(narrow, name))
        assert packed[:2, 1:].eq(filler).all()
        assert torch.equal(packed[2:], getattr(wide, name))
    assert torch.equal(scores.behavior_support[:2, 1:], torch.full((2, 3), -1))
    for name in ("tail_logprobs", "hidden", "labels"):
        assert torch.equal(getattr(scores, name), torch.cat((getattr(narrow, name), getattr(wide, name))))
    assert all(getattr(scores, field.name) is not None for field in dataclasses.fields(TeacherScores))


def test_valid_of_the_scorer_is_kept_and_absent_when_all_count():
    (batch,) = pack([make_scored([1], [2, 3], score_rows(2, 2)), make_scored([4], [5], score_rows(1, 2))], 64)
    assert batch.scores.valid is None
    valid = torch.tensor([[True, False], [False, True]])
    first = make_scored([1], [2, 3], score_rows(2, 2, valid=valid))
    (batch,) = pack([first, make_scored([4], [5], score_rows(1, 2))], 64)
    assert batch.scores.valid.tolist() == [*valid.tolist(), [True, True]]


@pytest.mark.parametrize("name", ["ids", "logprobs", "tail_logprobs", "hidden", "labels", "behavior_support"])
def test_scores_need_one_row_for_each_response_token(name):
    scores = score_rows(3, 2)
    shorter = dataclasses.replace(scores, **{name: getattr(scores, name)[:2]})
    with pytest.raises(ValueError, match=rf"scores\.{name} of prompt 'p' has 2 rows for 3 response tokens"):
        pack([make_scored([1], [2, 3, 4], shorter)], 64)


def test_log_probabilities_need_a_column_for_each_candidate():
    scores = dataclasses.replace(score_rows(2, 3), behavior_logprobs=torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"scores\.behavior_logprobs .* \(2, 1\) and scores.ids \(2, 3\)"):
        pack([make_scored([1], [2, 3], scores)], 64)


def test_answers_of_one_batch_have_the_same_scores():
    without = dataclasses.replace(score_rows(1, 2), tail_logprobs=None)
    with pytest.raises(ValueError, match=r"scores.tail_logprobs is missing for the answer to prompt 'b'"):
        pack([make_scored([1], [2], score_rows(1, 2), name="a"), make_scored([1], [2], without, name="b")], 64)
    heads = [dataclasses.replace(score_rows(1, 2), lm_head_weight=torch.zeros(2, 3)) for _ in range(2)]
    with pytest.raises(ValueError, match="one teacher's head"):
        pack([make_scored([1], [2], scores) for scores in heads], 64)


def test_scores_shifted_by_one_token_are_seen():
    """Scores written at token positions instead of response rows: [0, s1] where [s1, s2] is right."""
    scored = make_scored(
        [9], [4, 5], TeacherScores(ids=torch.tensor([[4], [5]]), logprobs=torch.tensor([[-1.0], [-2.0]]))
    )
    (batch,) = pack([scored], 8)
    following = torch.cat((batch.input_ids, scored.trajectory.response_ids[-1:]))[batch.loss_positions + 1]
    assert batch.scores.ids[:, 0].tolist() == following.tolist() == [4, 5]
    assert batch.scores.logprobs[:, 0].tolist() == [-1.0, -2.0]


def test_to_moves_every_tensor():
    (batch,) = pack([ScoredTrajectory(make_scored([1], [2, 3]).trajectory, score_rows(2, 2))], 8)
    moved = batch.to("meta")
    tensors = [value for record in (moved, moved.scores) for value in vars(record).values() if torch.is_tensor(value)]
    assert len(tensors) == 7 + 8
    assert all(tensor.is_meta for tensor in tensors)
    assert moved.max_seqlen == batch.max_seqlen

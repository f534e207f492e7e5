"""What the native teacher says of each response token, held against transformers' logits, one sequence at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.tiny_models import make_tiny_checkpoint, make_tiny_model
from tests.helpers.trajectories import make_trajectories
from titan_opd.config import Objective
from titan_opd.data import pack
from titan_opd.losses.vocab_parallel import VocabShard
from titan_opd.models import load_decoder
from titan_opd.teacher import LabelScorer, NativeScorer, TeacherModel
from titan_opd.teacher.projection import score_topk

VOCAB_ROWS = 101  # of tests/helpers/tiny_models.py
TWO_ROWS_MB = 2 * VOCAB_ROWS * 8 / 2**20  # memory of the logits of two float64 rows


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("teacher"), "qwen3")


@pytest.fixture(scope="module")
def reference():
    return make_tiny_model("qwen3").double()


def make_scorer(checkpoint, objective, *, dtype=torch.float64, **changes):
    """Several forward passes a call, and several chunks of logits a pass."""
    settings = {"vocab_size": VOCAB_ROWS, "top_k": 7, "tokens_per_forward": 20, "logits_chunk_mb": TWO_ROWS_MB}
    return NativeScorer(TeacherModel(load_decoder(checkpoint, dtype=dtype)), objective, **(settings | changes))


@torch.no_grad()
def teacher_logits(reference, trajectory):
    """[N, V] of one answer, unpadded and alone."""
    text = torch.cat([trajectory.prompt.token_ids, trajectory.response_ids])
    return reference(text[None]).logits[0, len(trajectory.prompt.token_ids) - 1 : -1]


def teacher_logprobs(reference, trajectory, vocab_size=VOCAB_ROWS, temperature=1.0):
    return (teacher_logits(reference, trajectory)[:, :vocab_size] / temperature).log_softmax(-1)


def log_mass_outside(logprobs, ids):
    return logprobs.scatter(1, ids, -torch.inf).logsumexp(-1)


def assert_scores(scores, logprobs, ids, atol=1e-5):
    """Probabilities at `ids` and outside them; rotary angles are float32 on both sides, in a float64 model too."""
    assert torch.equal(scores.ids, ids)
    torch.testing.assert_close(scores.logprobs.double(), logprobs.gather(1, ids), atol=atol, rtol=0)
    torch.testing.assert_close(scores.tail_logprobs.double(), log_mass_outside(logprobs, ids), atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("vocab_size", "temperature", "dtype", "atol"),
    [
        (VOCAB_ROWS, 1.0, torch.float64, 1e-5),
        (90, 0.7, torch.float64, 1e-5),
        (90, 1.8, torch.float32, 5e-5),
    ],
    ids=["plain", "padded vocabulary, cold", "float32, padded vocabulary, hot"],
)
def test_teacher_topk_equals_transformers(checkpoint, reference, vocab_size, temperature, dtype, atol):
    objective = Objective(kind="forward_kl", support="teacher_topk", temperature=temperature)
    scorer = make_scorer(checkpoint, objective, dtype=dtype, vocab_size=vocab_size)
    trajectories = make_trajectories(9, vocab_size=vocab_size)
    scored = scorer.score(trajectories)
    assert [one.trajectory for one in scored] == trajectories
    for one in scored:
        logprobs = teacher_logprobs(reference, one.trajectory, vocab_size, temperature)
        assert_scores(one.scores, logprobs, logprobs.topk(7).indices, atol)
        assert not one.scores.logprobs.requires_grad


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("support", "recorded", "ids", "logprobs"),
    [
        ("sampled", {"num_samples": 5}, "sampled_ids", "sampled_logprobs"),
        ("sampled", {"num_samples": 3, "num_kept": 8}, "sampled_ids", "sampled_logprobs"),
        ("sampled", {}, "response_ids", "behavior_logprobs"),
        ("student_topk", {"top_k": 6}, "topk_ids", "topk_logprobs"),
    ],
    ids=["samples", "samples of truncated sampling", "the written token alone", "student's top-k"],
)
def test_the_students_candidates_equal_transformers(
    checkpoint, reference, temperature, support, recorded, ids, logprobs
):
    kind = "policy_gradient" if support == "sampled" else "reverse_kl"
    scorer = make_scorer(checkpoint, Objective(kind=kind, support=support, temperature=temperature), vocab_size=95)
    for one in scorer.score(make_trajectories(9, vocab_size=95, **recorded)):
        num_tokens = len(one.trajectory.response_ids)
        expected_ids = getattr(one.trajectory, ids).view(num_tokens, -1)
        assert_scores(one.scores, teacher_logprobs(reference, one.trajectory, 95, temperature), expected_ids)
        behavior = getattr(one.trajectory, logprobs).view(num_tokens, -1)
        assert torch.equal(one.scores.behavior_logprobs, behavior)
        assert one.scores.behavior_support is one.trajectory.behavior_support


def test_more_candidates_than_tokens_are_all_tokens_and_leave_no_tail(checkpoint, reference):
    scorer = make_scorer(checkpoint, Objective(kind="forward_kl"), vocab_size=90, top_k=128)
    for one in scorer.score(make_trajectories(4, vocab_size=90)):
        logprobs = teacher_logprobs(reference, one.trajectory, 90)
        assert torch.equal(one.scores.ids, logprobs.topk(90).indices)
        torch.testing.assert_close(one.scores.logprobs.double(), logprobs.topk(90).values, atol=1e-5, rtol=0)
        assert (one.scores.tail_logprobs == -torch.inf).all()


def test_the_tail_is_exact_where_one_minus_the_sum_is_nothing():
    gaps = torch.tensor([20.0, 40.0, 60.0])  # nats from the most likely token to all others
    hidden, weight = torch.eye(3), torch.zeros(50, 3)
    weight[7] = gaps
    shard = VocabShard.create(weight, torch.float32, 50, None)
    scores = score_topk(hidden, shard, 1, temperature=1.0, logits_chunk_mb=1.0)
    assert scores.ids.tolist() == [[7]] * 3
    expected = torch.log(torch.tensor(49.0, dtype=torch.float64)) - gaps.double()
    torch.testing.assert_close(scores.tail_logprobs.double(), expected, atol=1e-5, rtol=0)
    assert (1 - scores.logprobs.exp()).max() < 1e-6  # what a tail derived from the candidates would be made of


def test_dense_scores_are_the_hidden_states_that_predict_each_token(checkpoint, reference):
    scorer = make_scorer(checkpoint, Objective(kind="jsd", support="dense"))
    scored = scorer.score(make_trajectories(9, vocab_size=VOCAB_ROWS))
    for one in scored:
        logits = one.scores.hidden @ one.scores.lm_head_weight.T
        torch.testing.assert_close(logits, teacher_logits(reference, one.trajectory), atol=1e-5, rtol=0)
        assert one.scores.ids is None
    assert sum(len(batch.scores.hidden) for batch in pack(scored, 30)) == sum(len(one.scores.hidden) for one in scored)


@pytest.mark.parametrize(("vocab_size", "temperature"), [(VOCAB_ROWS, 1.0), (90, 0.6)])
def test_the_teachers_own_samples_are_drawn_from_its_distribution(checkpoint, reference, vocab_size, temperature):
    objective = Objective(kind="mc_forward_kl", temperature=temperature)
    num_samples = 400
    scorer = make_scorer(checkpoint, objective, vocab_size=vocab_size, num_samples=num_samples, seed=5)
    deviations = []
    for one in scorer.score(make_trajectories(9, vocab_size=vocab_size)):
        logprobs = teacher_logprobs(reference, one.trajectory, vocab_size, temperature)
        assert_scores(one.scores, logprobs, one.scores.ids)
        assert one.scores.ids.shape == (len(logprobs), num_samples)
        assert one.scores.behavior_logprobs is None
        likely, probability = logprobs.argmax(-1, keepdim=True), logprobs.max(-1).values.exp()
        frequency = (one.scores.ids == likely).double().mean(-1)
        deviations.append((frequency - probability) / (probability * (1 - probability) / num_samples).sqrt())
    deviations = torch.cat(deviations)
    assert deviations.abs().max() < 5
    assert 0.5 < deviations.std() < 1.5  # as independent draws deviate


def test_the_teachers_samples_differ_by_seed_and_answer_but_not_by_what_is_scored_beside(checkpoint):
    objective = Objective(kind="mc_forward_kl")
    trajectories = make_trajectories(6, vocab_size=VOCAB_ROWS)
    scorer, other = (make_scorer(checkpoint, objective, num_samples=20, seed=seed) for seed in (0, 1))
    together = scorer.score(trajectories)
    alone = [scorer.score([trajectory])[0] for trajectory in trajectories[::-1]][::-1]
    for one, lone, different in zip(together, alone, other.score(trajectories), strict=True):
        assert torch.equal(one.scores.ids, lone.scores.ids)
        assert not torch.equal(one.scores.ids, different.scores.ids)
    renamed = replace(trajectories[0], sample=replace(trajectories[0].sample, number=77))
    assert not torch.equal(scorer.score([renamed])[0].scores.ids, together[0].scores.ids)


def test_scores_do_not_depend_on_what_is_scored_beside(checkpoint):
    trajectories = make_trajectories(6, vocab_size=VOCAB_ROWS)
    scorer = make_scorer(checkpoint, Objective(kind="forward_kl"), dtype=torch.float32)
    together = scorer.score(trajectories)
    backwards = scorer.score(trajectories[::-1])[::-1]
    alone = [scorer.score([trajectory])[0] for trajectory in trajectories]
    for one, other, lone in zip(together, backwards, alone, strict=True):
        for scores in (other.scores, lone.scores):
            assert torch.equal(one.scores.ids, scores.ids)
            torch.testing.assert_close(one.scores.logprobs, scores.logprobs, atol=2e-5, rtol=0)


def test_an_answer_longer_than_a_forward_pass_is_refused(checkpoint):
    scorer = make_scorer(checkpoint, Objective(kind="forward_kl"), tokens_per_forward=3)
    with pytest.raises(ValueError, match=r"'prompt-\d' .* more than teacher\.tokens_per_forward = 3"):
        scorer.score(make_trajectories(5, vocab_size=VOCAB_ROWS))


def test_without_a_teacher_the_answers_own_tokens_are_the_labels():
    trajectories = make_trajectories(3, vocab_size=VOCAB_ROWS)
    for trajectory, one in zip(trajectories, LabelScorer().score(trajectories), strict=True):
        assert one.trajectory is trajectory
        assert torch.equal(one.scores.labels, trajectory.response_ids)

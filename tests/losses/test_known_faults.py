"""Faults of other distillation systems, each as a kind: small inputs with the outcome that is right."""

from dataclasses import replace

import pytest
import torch

from tests.losses.scenes import build_scene
from titan_opd.losses import Objective, TeacherScores, distillation_loss


def loss_of_probabilities(p, objective, scores):
    """The loss of one row whose student has the probabilities p, with the gradient in its logits."""
    logits = torch.tensor([p], dtype=torch.float64).log()
    weight = logits.T.clone().requires_grad_()
    hidden = torch.ones(1, 1, dtype=torch.float64)
    output = distillation_loss(hidden, weight, objective, scores, torch.ones(1))
    output.loss.backward()
    return output.loss.item(), weight.grad.flatten()


def test_a_bare_sum_is_negative_and_still_trains():
    """A sparse sum below 0 that is clamped has no gradient; the bucket makes it a divergence; nothing is clamped."""
    q, p = (0.5, 0.2, 0.1, 0.1, 0.1), (0.7, 0.25, 0.03, 0.01, 0.01)
    log_q = torch.tensor([q], dtype=torch.float64).log()
    top2 = TeacherScores(ids=torch.tensor([[0, 1]]), logprobs=log_q[:, :2])
    values = {}
    for tail in ("drop", "bucket"):
        values[tail], gradient = loss_of_probabilities(p, Objective("forward_kl", tail=tail), top2)
        assert gradient.abs().min() > 1e-3
    dense_scores = TeacherScores(hidden=torch.ones(1, 1, dtype=torch.float64), lm_head_weight=log_q.T)
    values["dense"], _ = loss_of_probabilities(p, Objective("forward_kl", support="dense"), dense_scores)
    assert values == pytest.approx({"drop": -0.2129, "bucket": 0.3247, "dense": 0.3680}, abs=5e-5)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "alpha_beta"])
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "drop"])
@pytest.mark.parametrize("padding", [-torch.inf, -1e10, torch.nan, 5.0])
def test_padding_of_ragged_supports_never_enters_the_graph(kind, tail, padding):
    scene = build_scene(Objective(kind, support="teacher_topk", tail=tail), seed=1)
    counts = torch.tensor([4, 1, 3, 2, 4, 0])
    valid = torch.arange(4) < counts[:, None]
    # The tail holds what is outside the valid ids, so it grows by the candidates that are left out.
    left_out = torch.where(valid, -torch.inf, scene.scores.logprobs).logsumexp(-1)
    tail_logprobs = torch.logaddexp(scene.scores.tail_logprobs, left_out)
    ragged = scene.with_scores(
        ids=torch.where(valid, scene.scores.ids, 10**9),
        logprobs=torch.where(valid, scene.scores.logprobs, padding),
        tail_logprobs=tail_logprobs,
        valid=valid,
    )
    output, grad_hidden, grad_weight = ragged.gradients(num_tokens=6)
    total_weight = torch.zeros_like(grad_weight)
    for row, count in enumerate(counts.tolist()):
        alone = scene.with_scores(tail_logprobs=tail_logprobs).rows(slice(row, row + 1))
        if count == 0:  # nothing to compare but the bucket, which is everything on both sides
            assert output.per_token[row] == 0
            assert not grad_hidden[row].any()
            continue
        alone = alone.with_scores(ids=alone.scores.ids[:, :count], logprobs=alone.scores.logprobs[:, :count])
        part, part_hidden, part_weight = alone.gradients(num_tokens=6)
        torch.testing.assert_close(output.per_token[row], part.per_token[0])
        torch.testing.assert_close(grad_hidden[row], part_hidden[0])
        total_weight += part_weight
    torch.testing.assert_close(grad_weight, total_weight)


def test_shifted_scores_do_not_go_unnoticed():
    """Rows belong to tokens: a teacher that is the student agrees everywhere, and nowhere when shifted by one."""
    scene = build_scene(Objective("forward_kl"), seed=2, teacher_is_student=True)
    assert scene.loss().per_token.abs().max() < 1e-12
    assert scene.with_scores(**vars(scene.scores[torch.arange(6).roll(1)])).loss().per_token.min() > 0.1


def test_tokens_that_nobody_wrote_are_left_out():
    """Tool tokens with a placeholder log-probability of 0.0: weight 0, no gradient, not in the denominator."""
    scene = build_scene(Objective("policy_gradient"), seed=3)
    is_tool = torch.tensor([False, True, True, False, False, False])
    placeholder = torch.where(is_tool[:, None], 0.0, scene.scores.behavior_logprobs)
    masked = replace(
        scene.with_scores(behavior_logprobs=placeholder),
        token_weights=torch.where(is_tool, 0, scene.token_weights),
    )
    output, grad_hidden, _ = masked.gradients()
    assert not grad_hidden[is_tool].any()
    torch.testing.assert_close(output.loss, scene.rows(~is_tool).loss().loss)


def test_padded_vocabulary_rows_have_no_probability():
    """Rows beyond the tokenizer's tokens, full of large numbers, on either side and both routes."""
    for objective in (Objective("forward_kl"), Objective("reverse_kl", support="dense"), Objective("cross_entropy")):
        scene = build_scene(objective, seed=4)
        garbage = torch.full((5, 5), 50.0, dtype=torch.float64)
        padded = replace(scene, weight=torch.cat([scene.weight, garbage]))
        if scene.scores.lm_head_weight is not None:
            padded = padded.with_scores(lm_head_weight=torch.cat([scene.scores.lm_head_weight, garbage, garbage]))
        output, grad_hidden, grad_weight = padded.gradients(vocab_size=19)
        expected, expected_hidden, expected_weight = scene.gradients()
        torch.testing.assert_close(output.per_token, expected.per_token)
        torch.testing.assert_close(grad_hidden, expected_hidden)
        torch.testing.assert_close(grad_weight[:19], expected_weight)
        assert not grad_weight[19:].any()


def test_a_teacher_probability_of_zero_is_clamped_and_counted():
    scene = build_scene(Objective("forward_kl", tail="drop"), seed=5)
    logprobs = scene.scores.logprobs.clone()
    logprobs[:, 3] = -torch.inf
    output, grad_hidden, _ = scene.with_scores(logprobs=logprobs).gradients()
    assert output.per_token.isfinite().all()
    assert grad_hidden.isfinite().all()
    assert output.metrics["teacher_clamped_share"].item() == pytest.approx(1 / 4)

"""What an optimizer step finds out about all of its rows before the gradients: M2PO's bound, the proximal policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.losses.scenes import Scene, build_scene
from titan_opd.losses import Objective, TeacherScores, binding_squares, m2po_bound, policy_logprobs

M2PO = {
    f"{support}, {advantage}": Objective(
        "policy_gradient", support=support, advantage=advantage, correction="m2po", m2_budget=0.02
    )
    for support in ("sampled", "student_topk")
    for advantage in ("learner", "rollout")
}
PARTS = (slice(0, 1), slice(1, 4), slice(4, 6))


def sweep(read, scene: Scene, **options):
    return read(scene.hidden, scene.weight, scene.objective, scene.scores, scene.token_weights, **options)


@pytest.mark.parametrize("name", M2PO)
def test_micro_batches_under_the_bound_of_all_add_up_to_the_batch(name):
    scene = build_scene(M2PO[name], seed=6)
    parts = [scene.rows(rows) for rows in PARTS]
    squares = torch.cat([sweep(binding_squares, part, logits_chunk_mb=1e-4) for part in parts])
    bound = m2po_bound(squares, scene.objective.m2_budget)
    assert 0 < bound < torch.inf, "the bound has to bind for this test to see it"

    whole, grad_hidden, grad_weight = scene.gradients(num_tokens=11)
    outputs = [part.gradients(num_tokens=11, m2po_bound=bound) for part in parts]
    torch.testing.assert_close(sum(output.loss for output, _, _ in outputs), whole.loss)
    torch.testing.assert_close(torch.cat([output.per_token for output, _, _ in outputs]), whole.per_token)
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in outputs]), grad_hidden)
    torch.testing.assert_close(sum(grad for _, _, grad in outputs), grad_weight)

    alone = sum(part.gradients(num_tokens=11)[0].loss for part in parts)
    assert not torch.isclose(alone, whole.loss), "each micro-batch's own bound would do as well here"


def test_binding_squares_are_those_whose_clip_would_bind():
    scene = build_scene(M2PO["sampled, learner"], seed=2)
    log_p = (scene.hidden @ scene.weight.T).log_softmax(-1).gather(1, scene.scores.ids)
    log_ratio, advantage = log_p - scene.scores.behavior_logprobs, scene.scores.logprobs - log_p
    expected = (log_ratio**2)[advantage * log_ratio > 0]
    torch.testing.assert_close(sweep(binding_squares, scene), expected)
    assert 0 < len(expected) < log_ratio.numel()
    discounted = replace(scene, objective=replace(scene.objective, staleness_discount=0.5))
    assert torch.equal(sweep(binding_squares, discounted), sweep(binding_squares, scene))


def test_rows_of_weight_zero_bind_nothing():
    scene = build_scene(M2PO["sampled, learner"], seed=2)
    masked = replace(scene, token_weights=scene.token_weights.index_fill(0, torch.tensor([1, 4]), 0))
    kept = scene.rows(torch.tensor([0, 2, 3, 5]))
    assert torch.equal(sweep(binding_squares, masked), sweep(binding_squares, kept))
    nothing = replace(scene, token_weights=torch.zeros_like(scene.token_weights))
    assert len(sweep(binding_squares, nothing)) == 0
    assert m2po_bound(sweep(binding_squares, nothing), 0.02) == torch.inf


@pytest.mark.parametrize("support", ["sampled", "student_topk"])
def test_policy_logprobs_are_the_present_students(support):
    scene = build_scene(Objective("policy_gradient", support=support, correction="decoupled", temperature=0.7), seed=3)
    scene = replace(scene, token_weights=scene.token_weights.index_fill(0, torch.tensor([2]), 0))
    expected = (scene.hidden @ scene.weight.T / 0.7).log_softmax(-1).gather(1, scene.scores.ids)
    expected[2] = 0
    scores = TeacherScores(ids=scene.scores.ids, logprobs=scene.scores.logprobs)  # no proximal policy is known yet
    found = sweep(policy_logprobs, replace(scene, scores=scores), logits_chunk_mb=1e-4)
    torch.testing.assert_close(found, expected)


def test_policy_logprobs_are_renormalised_on_what_truncated_sampling_kept():
    scene = build_scene(Objective("policy_gradient", correction="decoupled"), seed=4, num_candidates=3)
    log_p = (scene.hidden @ scene.weight.T).log_softmax(-1)
    support = torch.cat([log_p.topk(5).indices, scene.scores.ids], dim=-1)
    kept = torch.zeros_like(log_p, dtype=torch.bool).scatter(1, support, True)
    unique = [row.nonzero().squeeze(1) for row in kept]
    padded = torch.nn.utils.rnn.pad_sequence(unique, batch_first=True, padding_value=-1)
    expected = log_p.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, scene.scores.ids)
    torch.testing.assert_close(sweep(policy_logprobs, scene.with_scores(behavior_support=padded)), expected)


def test_the_present_student_as_proximal_policy_clips_nothing():
    scene = build_scene(Objective("policy_gradient", correction="decoupled", cap=1e6), seed=5)
    proximal = scene.with_scores(proximal_logprobs=sweep(policy_logprobs, scene))
    output, *gradients = proximal.gradients()
    assert output.metrics["clipped_share"] == 0
    # The decoupled weight alone is left: the importance ratio of the present policy.
    _, *expected = replace(scene, objective=Objective("policy_gradient", correction="importance")).gradients()
    torch.testing.assert_close(gradients, expected)

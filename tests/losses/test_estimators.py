"""Sampled objectives estimate what they claim: exact expectations, by enumerating a small vocabulary."""

from dataclasses import replace

import pytest
import torch

from tests.losses.scenes import Scene, build_scene
from titan_opd.losses import Objective, TeacherScores
from titan_opd.losses.policy import m2po_bound

VOCAB = 19


def enumerated(scene: Scene, objective: Objective, sampler_logprobs_NV, teacher_logprobs_NV) -> Scene:
    """Every token of the vocabulary as the one sample of a row, weighted with its probability under the sampler."""
    num_rows = len(scene.hidden)
    ids = torch.arange(VOCAB).repeat(num_rows)[:, None]
    return Scene(
        objective,
        hidden=scene.hidden.repeat_interleave(VOCAB, 0),
        weight=scene.weight,
        scores=TeacherScores(
            ids=ids,
            logprobs=teacher_logprobs_NV.reshape(-1, 1),
            behavior_logprobs=sampler_logprobs_NV.reshape(-1, 1),
            proximal_logprobs=sampler_logprobs_NV.reshape(-1, 1),
        ),
        token_weights=sampler_logprobs_NV.exp().flatten(),
    )


def models(seed: int = 1):
    """A dense scene of unit weights, and both sides' log-probabilities."""
    scene = build_scene(Objective("reverse_kl", support="dense"), seed=seed)
    scene = replace(scene, token_weights=torch.ones_like(scene.token_weights))
    log_p = (scene.hidden @ scene.weight.T).log_softmax(-1)
    log_q = (scene.scores.hidden @ scene.scores.lm_head_weight.T).log_softmax(-1)
    return scene, log_p, log_q


def summed_by_row(grad_hidden, num_rows):
    return grad_hidden.view(num_rows, VOCAB, -1).sum(1)


@pytest.mark.parametrize("correction", ["none", "importance", "truncated", "masked", "ppo_clip", "decoupled", "m2po"])
def test_on_policy_every_correction_has_the_reverse_kl_gradient(correction):
    """At rho = 1 no correction acts: the expected gradient is that of the dense reverse KL, exactly."""
    scene, log_p, log_q = models()
    _, dense_hidden, dense_weight = scene.gradients(num_tokens=6)
    sampled = enumerated(scene, Objective("policy_gradient", correction=correction), log_p, log_q)
    _, grad_hidden, grad_weight = sampled.gradients(num_tokens=6)
    torch.testing.assert_close(summed_by_row(grad_hidden, 6), dense_hidden)
    torch.testing.assert_close(grad_weight, dense_weight)


def test_importance_ratios_make_stale_samples_unbiased():
    """With samples of any older policy, value and gradient are those of the current student's reverse KL."""
    scene, _, log_q = models()
    log_old = torch.randn(6, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    dense, dense_hidden, dense_weight = scene.gradients(num_tokens=6)
    stale = enumerated(scene, Objective("policy_gradient", correction="importance"), log_old, log_q)
    output, grad_hidden, grad_weight = stale.gradients(num_tokens=6)
    torch.testing.assert_close(output.loss, dense.loss)
    torch.testing.assert_close(summed_by_row(grad_hidden, 6), dense_hidden)
    torch.testing.assert_close(grad_weight, dense_weight)


def test_samples_of_the_teacher_estimate_the_forward_kl():
    scene, _, log_q = models()
    dense, dense_hidden, dense_weight = replace(scene, objective=Objective("forward_kl", support="dense")).gradients(
        num_tokens=6
    )
    output, grad_hidden, grad_weight = enumerated(scene, Objective("mc_forward_kl"), log_q, log_q).gradients(
        num_tokens=6
    )
    torch.testing.assert_close(output.loss, dense.loss)
    torch.testing.assert_close(summed_by_row(grad_hidden, 6), dense_hidden)
    torch.testing.assert_close(grad_weight, dense_weight)


def test_the_whole_vocabulary_as_student_support_is_the_expectation():
    """student_topk with K = V and the learner's advantage: the reverse KL's gradient without sampling."""
    scene, _, log_q = models()
    _, dense_hidden, dense_weight = scene.gradients()
    ids = torch.arange(VOCAB).expand(6, -1)
    objective = Objective("policy_gradient", support="student_topk", correction="none")
    expectation = replace(scene, objective=objective, scores=TeacherScores(ids=ids, logprobs=log_q))
    _, grad_hidden, grad_weight = expectation.gradients()
    torch.testing.assert_close(grad_hidden, dense_hidden)
    torch.testing.assert_close(grad_weight, dense_weight)


def test_the_bare_log_ratio_teaches_nothing_of_the_teacher_and_is_refused():
    """The mean of log p - log q over the student's samples, differentiated as it stands, has no teacher in it."""
    scene, log_p, log_q = models()
    logits = (scene.hidden @ scene.weight.T).requires_grad_()
    expected = (log_p.exp() * (logits.log_softmax(-1) - log_q)).sum()
    assert torch.autograd.grad(expected, logits)[0].abs().max() < 1e-12
    with pytest.raises(ValueError, match="policy_gradient"):
        Objective("reverse_kl", support="sampled")


def test_a_sample_that_is_drawn_twice_counts_twice():
    """Duplicates among m samples: as if each were the only sample of a row of its own, averaged."""
    for kind in ("policy_gradient", "mc_forward_kl"):
        scene = build_scene(Objective(kind), seed=3)
        repeated = scene.scores.ids.clone()
        repeated[:, 1:3] = repeated[:, :1]
        fields = {
            name: getattr(scene.scores, name)[:, [0, 0, 0, 3]]
            for name in ("logprobs", "behavior_logprobs", "proximal_logprobs")
        }
        together = scene.with_scores(ids=repeated, **fields)
        output, grad_hidden, grad_weight = together.gradients(num_tokens=6)
        singles = [
            together.with_scores(
                ids=repeated[:, [column]], **{name: value[:, [column]] for name, value in fields.items()}
            ).gradients(num_tokens=6)
            for column in range(4)
        ]
        torch.testing.assert_close(output.per_token, sum(single[0].per_token for single in singles) / 4)
        torch.testing.assert_close(grad_hidden, sum(single[1] for single in singles) / 4)
        torch.testing.assert_close(grad_weight, sum(single[2] for single in singles) / 4)


def test_truncated_sampling_compares_on_the_kept_set():
    """A student that has not moved has ratio 1 on the set it sampled from; its raw probabilities are smaller."""
    scene = build_scene(Objective("policy_gradient"), seed=4)
    log_p = (scene.hidden @ scene.weight.T).log_softmax(-1)
    kept = log_p.topk(7).indices
    log_kept = log_p.gather(1, kept).log_softmax(-1)
    columns = torch.multinomial(log_kept.exp(), 4, replacement=True, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([kept, torch.full((6, 2), -1)], dim=-1)
    ids, behavior = kept.gather(1, columns), log_kept.gather(1, columns)
    sampled = scene.with_scores(ids=ids, behavior_logprobs=behavior, behavior_support=padded)
    assert sampled.loss().metrics["importance_ratio"].item() == pytest.approx(1)
    assert sampled.loss().metrics["effective_sample_share"].item() == pytest.approx(1)
    assert sampled.with_scores(behavior_support=None).loss().metrics["importance_ratio"] < 0.99


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "clipped"),
    [
        (0.7, 1, True),  # already twice as likely, and wanted: enough
        (-0.7, 1, False),
        (0.7, -1, False),
        (-0.7, -1, True),
        (1.2, -1, True),  # 3.3 times as likely, and not wanted: the dual clip of 3 binds
    ],
)
def test_clipped_samples_have_no_gradient(log_ratio, advantage, clipped):
    objective = Objective("policy_gradient", correction="ppo_clip", dual_clip=3.0)
    scene = build_scene(objective, seed=5)
    log_p, ids = (scene.hidden @ scene.weight.T).log_softmax(-1).min(-1, keepdim=True)
    scores = TeacherScores(ids=ids, logprobs=log_p + advantage, behavior_logprobs=log_p - log_ratio)
    output, grad_hidden, _ = replace(scene, scores=scores).gradients()
    assert bool(grad_hidden.any()) is not clipped
    assert output.metrics["clipped_share"].item() == float(clipped)


def test_m2po_bound_spends_its_budget_exactly():
    """The bounded squares' mean is the budget, and it is infinite where they need no bound."""
    generator = torch.Generator().manual_seed(6)
    for _ in range(20):
        squares = torch.rand(5, 3, generator=generator, dtype=torch.float64) ** 3
        squares[torch.rand(5, 3, generator=generator) < 0.3] = torch.inf
        binding = squares[squares.isfinite()]
        for budget in (0.001, 0.05, 0.2, 2.0):
            tau = m2po_bound(squares, budget)
            if binding.mean() <= budget:
                assert tau == torch.inf
            else:
                torch.testing.assert_close(binding.clamp(max=tau.item() ** 2).mean().item(), budget)
    assert m2po_bound(torch.full((2, 2), torch.inf), 0.1) == torch.inf
    assert m2po_bound(torch.tensor([[0.5]]), 0.0) == 0


def test_a_staler_row_counts_less_and_the_denominator_stays():
    scene = build_scene(Objective("forward_kl", staleness_discount=0.5), seed=7)
    versions = torch.tensor([7, 6, 5, 7, 4, 7], dtype=torch.int32)
    output = scene.loss(policy_versions=versions, current_version=7)
    weights = scene.token_weights * torch.tensor([1, 0.5, 0.25, 1, 0.125, 1], dtype=torch.float64)
    torch.testing.assert_close(output.loss, (weights * output.per_token).sum() / 6)

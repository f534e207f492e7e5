"""The fused head's own promises: memory, precision, and when it works for what."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.losses.scenes import build_scene
from titan_opd.losses import Objective, TeacherScores
from titan_opd.losses.hybrid import Hybrid
from titan_opd.losses.inputs import build_inputs
from titan_opd.losses.rows import StudentRows

ONE_PER_ROUTE = {
    "candidates": Objective("forward_kl"),
    "samples": Objective("policy_gradient"),
    "sweep before": Objective("policy_gradient", correction="m2po"),
    "dense": Objective("jsd", support="dense"),
    "adaptive": Objective("adaptive_kl"),
    "drawn": Objective("hybrid", support="dense"),
}
ONE_ROW_MB = 1 / 2**20  # a chunk as small as it gets
routes = pytest.mark.parametrize("objective", ONE_PER_ROUTE.values(), ids=ONE_PER_ROUTE.keys())


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of any tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@routes
def test_never_a_matrix_of_tokens_by_vocabulary(objective):
    scene = build_scene(objective, num_rows=96, vocab=2048, hidden_size=4).to(torch.float32)
    with LargestTensor() as largest:
        scene.gradients(logits_chunk_mb=8 * 2048 * 4 / 2**20)
    assert largest.numel < 96 * 2048 / 8


@pytest.mark.parametrize(
    ("rows_that_fit", "chunks"), [(4, [3, 3, 3]), (8, [5, 4]), (9, [9]), (100, [9]), (0.5, [1] * 9)]
)
def test_chunks_are_of_about_equal_sizes(rows_that_fit, chunks):
    """A last chunk of one row would cost a whole pass over the weight gradient."""
    scene = build_scene(Objective("forward_kl"), num_rows=9)
    inputs, _ = build_inputs(
        scene.hidden,
        scene.weight,
        scene.objective,
        scene.scores,
        scene.token_weights,
        logits_chunk_mb=rows_that_fit * 19 * 8 / 2**20,
    )
    assert [len(logits) for _, logits in inputs.logits()] == chunks


@routes
@pytest.mark.parametrize("chunk_mb", [ONE_ROW_MB, 256.0])
def test_logprobs_of_written_tokens_beside_the_loss(objective, chunk_mb):
    """By their definition, over the tokens that exist, whatever the objective; and the loss is what it is without."""
    scene = build_scene(replace(objective, temperature=0.7), seed=2)
    scene.token_weights[1] = 0
    written = torch.tensor([3, 0, 16, 3, 9, 1])
    output, *gradients = scene.gradients(logits_chunk_mb=chunk_mb, written_ids=written)
    logprobs = (scene.hidden @ scene.weight.T / 0.7).log_softmax(-1)
    expected = logprobs.gather(1, written[:, None])[:, 0]
    expected[1] = 0
    torch.testing.assert_close(output.written_logprobs, expected)
    plain, *plain_gradients = scene.gradients(logits_chunk_mb=chunk_mb)
    assert plain.written_logprobs is None
    torch.testing.assert_close([output.per_token, *gradients], [plain.per_token, *plain_gradients], rtol=0, atol=0)


@routes
def test_gradients_only_for_what_requires_them(objective):
    scene = build_scene(objective, seed=1)
    both, grad_hidden, grad_weight = scene.gradients()

    hidden = scene.hidden.clone().requires_grad_()
    scene.loss(hidden=hidden).loss.backward()
    torch.testing.assert_close(hidden.grad, grad_hidden)
    weight = scene.weight.clone().requires_grad_()
    scene.loss(weight=weight).loss.backward()
    torch.testing.assert_close(weight.grad, grad_weight)

    plain = scene.loss()
    with torch.no_grad():
        quiet = scene.loss(hidden=hidden, weight=weight)
    for output in (plain, quiet):
        assert not output.loss.requires_grad
        torch.testing.assert_close(output.loss, both.loss.detach())
        torch.testing.assert_close(output.per_token, both.per_token)
        torch.testing.assert_close(output.metrics, both.metrics)


def test_the_upstream_gradient_scales_and_a_second_backward_is_refused():
    scene = build_scene(Objective("forward_kl"), seed=2)
    _, grad_hidden, grad_weight = scene.gradients()
    hidden, weight = scene.hidden.clone().requires_grad_(), scene.weight.clone().requires_grad_()
    loss = scene.loss(hidden, weight).loss
    (2.5 * loss).backward(retain_graph=True)
    torch.testing.assert_close(hidden.grad, 2.5 * grad_hidden)
    torch.testing.assert_close(weight.grad, 2.5 * grad_weight)
    with pytest.raises(RuntimeError, match="call distillation_loss again"):
        loss.backward()


def test_inputs_and_scores_are_left_as_they_were():
    for objective in ONE_PER_ROUTE.values():
        scene = build_scene(objective, seed=3)
        tensors = [scene.hidden, scene.weight, scene.token_weights, *vars(scene.scores).values()]
        before = [None if tensor is None else tensor.clone() for tensor in tensors]
        scene.gradients()
        torch.testing.assert_close(tensors, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["candidates", "samples", "dense"])
def test_bfloat16_is_summed_in_float32(name):
    """Against float64 on the same rounded weights, over 1024 chunks: a sum in bfloat16 would be 3 % off."""
    rounded = build_scene(ONE_PER_ROUTE[name], seed=4, num_rows=1024, vocab=64).to(torch.bfloat16)
    output, grad_hidden, grad_weight = rounded.gradients(logits_chunk_mb=ONE_ROW_MB)
    expected, expected_hidden, expected_weight = rounded.to(torch.float64).gradients()
    assert output.loss.dtype == output.per_token.dtype == torch.float32
    assert (grad_hidden.dtype, grad_weight.dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(output.loss.double(), expected.loss, rtol=2e-3, atol=0)
    for grad, other in ((grad_hidden, expected_hidden), (grad_weight, expected_weight)):
        assert (grad.double() - other).norm() < 0.015 * other.norm()


def test_a_float32_projection_under_bfloat16_hidden_states_keeps_a_float32_gradient():
    scene = build_scene(Objective("forward_kl"), seed=5, num_rows=64)
    mixed = replace(scene, hidden=scene.hidden.bfloat16(), weight=scene.weight.bfloat16().float())
    _, grad_hidden, grad_weight = mixed.gradients()
    assert (grad_hidden.dtype, grad_weight.dtype) == (torch.bfloat16, torch.float32)
    _, _, expected = replace(mixed, hidden=mixed.hidden.double(), weight=mixed.weight.double()).gradients()
    assert (grad_weight.double() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_a_tiny_tail_is_exact_in_float32(kind):
    """The student's tail has 1e-7 of the mass, the teacher's a third: each outside logit's gradient is right."""
    vocab, num_candidates = 64, 4
    logits = torch.randn(1, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    logits[:, :num_candidates] += 20
    objective = Objective(kind, support="student_topk")
    scene = build_scene(objective, num_rows=1, vocab=vocab, hidden_size=1)
    logprobs = torch.full((1, num_candidates), 2 / 3 / num_candidates, dtype=torch.float64).log()
    scene = replace(
        scene.with_scores(
            ids=torch.arange(num_candidates)[None],
            logprobs=logprobs,
            tail_logprobs=torch.tensor([1 / 3], dtype=torch.float64).log(),
        ),
        hidden=torch.ones(1, 1, dtype=torch.float64),
        weight=logits.T.float().double(),
    )
    # With one hidden unit of 1, the projection's gradient is the logits' gradient.
    _, _, expected = scene.gradients()
    output, _, grad = scene.to(torch.float32).gradients()
    torch.testing.assert_close(grad.double(), expected, rtol=2e-5, atol=0)
    torch.testing.assert_close(output.per_token.double(), scene.loss().per_token, rtol=1e-6, atol=0)


def test_top1_agreement_and_support_mass():
    scene = build_scene(Objective("forward_kl"), seed=7, num_rows=40)
    student = (scene.hidden @ scene.weight.T).softmax(-1)
    teacher_top = scene.scores.ids[:, 0]
    agrees = (student.argmax(-1) == teacher_top).double().mean()
    assert 0 < agrees < 1
    metrics = scene.loss().metrics
    torch.testing.assert_close(metrics["top1_agreement"], agrees)
    torch.testing.assert_close(metrics["student_support_mass"], student.gather(1, scene.scores.ids).sum(-1).mean())
    torch.testing.assert_close(metrics["teacher_support_mass"], scene.scores.logprobs.exp().sum(-1).mean())

    dense = build_scene(Objective("reverse_kl", support="dense"), seed=7, num_rows=40)
    teacher = (dense.scores.hidden @ dense.scores.lm_head_weight.T).log_softmax(-1)
    log_p = (dense.hidden @ dense.weight.T).log_softmax(-1)
    metrics = dense.loss().metrics
    torch.testing.assert_close(metrics["top1_agreement"], (log_p.argmax(-1) == teacher.argmax(-1)).double().mean())
    torch.testing.assert_close(metrics["student_entropy"], -(log_p.exp() * log_p).sum(-1).mean())
    torch.testing.assert_close(metrics["teacher_entropy"], -(teacher.exp() * teacher).sum(-1).mean())


def test_the_teachers_share_of_the_gradient():
    """Reverse KL: against the two parts of the gradient in the logits, each by autograd."""
    scene = build_scene(Objective("reverse_kl", support="teacher_topk", tail="drop"), seed=9, num_candidates=19)
    assert scene.scores.ids.shape[1] == len(scene.weight)  # the support is the whole vocabulary
    logits = (scene.hidden @ scene.weight.T).requires_grad_()
    log_p = logits.log_softmax(-1)
    log_q = torch.empty_like(log_p).scatter_(1, scene.scores.ids, scene.scores.logprobs)
    (teacher,) = torch.autograd.grad((log_p.exp() * log_q).sum(), logits, retain_graph=True)
    (student,) = torch.autograd.grad((log_p.exp() * log_p).sum(), logits)
    teacher, student = teacher.abs().sum(-1), student.abs().sum(-1)
    expected = (teacher / (teacher + student)).mean()
    torch.testing.assert_close(scene.loss().metrics["teacher_gradient_share"], expected)

    scene = build_scene(Objective("policy_gradient", correction="none"), seed=9, num_rows=6)
    log_p = (scene.hidden @ scene.weight.T).log_softmax(-1).gather(1, scene.scores.ids)
    expected = (scene.scores.logprobs / (scene.scores.logprobs + log_p)).mean()
    torch.testing.assert_close(scene.loss().metrics["teacher_gradient_share"], expected)


def test_a_hybrid_that_hears_no_teacher_says_so():
    def share(log_q, log_p):
        log_p_C2 = torch.tensor([log_p], dtype=torch.float64)
        student = StudentRows(log_p_C2, torch.zeros(1), torch.zeros(1, dtype=torch.bool), torch.zeros(1))
        scores = TeacherScores(ids=torch.tensor([[1, 2]]), logprobs=torch.tensor([log_q], dtype=torch.float64))
        return Hybrid(Objective("hybrid"))(student, scores).metrics["teacher_gradient_share"].item()

    # k(a*) <= 0 and k(a) >= 0: the weight is p (log q - log p) of the expert's token alone.
    assert share([-3.0, -0.5], [-1.0, -2.0]) == pytest.approx(3 / 4)
    # k(a*) > 0 and k(a) >= 0: q + p log q - p log p.
    q, p = math.exp(-0.5), math.exp(-1.0)
    assert share([-0.5, -0.5], [-1.0, -2.0]) == pytest.approx((q - p * 0.5) / (q - p * 0.5 + p))


def test_metrics_of_stale_samples():
    scene = build_scene(Objective("policy_gradient", correction="masked", band=(0.9, 1.2)), seed=8, num_rows=20)
    log_p = (scene.hidden @ scene.weight.T).log_softmax(-1).gather(1, scene.scores.ids)
    ratio = (log_p - scene.scores.behavior_logprobs).exp()
    gap = scene.scores.logprobs - log_p
    dropped = ((ratio < 0.9) | (ratio > 1.2)).double().mean()
    expected = {
        "importance_ratio": ratio.mean(),
        "importance_ratio_max": ratio.max(),
        "effective_sample_share": ratio.sum() ** 2 / (ratio.numel() * ratio.square().sum()),
        "dropped_share": dropped,
        "reverse_kl_k1": -gap.mean(),
        "reverse_kl_k2": gap.square().mean() / 2,
        "reverse_kl_k3": (gap.exp() - 1 - gap).mean(),
        "advantage": gap.mean(),
    }
    assert 0 < dropped < 1
    metrics = scene.loss(logits_chunk_mb=1000 / 2**20).metrics
    for name, value in expected.items():
        torch.testing.assert_close(metrics[name], value, msg=lambda text, name=name: f"{name}: {text}")

"""What must hold for any input, objective by objective."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.losses.scenes import F_DIVERGENCES, OBJECTIVES, SPARSE_DIVERGENCES, build_scene
from titan_opd.config.objective import TOP_K_SUPPORTS
from titan_opd.losses import Objective, TeacherScores

ONE_ROW_MB = 1 / 2**20  # a chunk as small as it gets: one row


def objectives(condition=lambda objective: True):
    """The test, once for each objective that meets the condition."""
    chosen = {name: objective for name, objective in OBJECTIVES.items() if condition(objective)}
    return pytest.mark.parametrize("objective", chosen.values(), ids=chosen.keys())


def draws(objective):
    """Whether the head itself draws a sample for each row of a call."""
    return objective.kind == "hybrid" and objective.support == "dense"


def vanishes_at_teacher(objective):
    """Not so: labels, samples of the teacher, bare sums, and HPD's weights, which jump where the two sides agree."""
    return objective.kind not in ("cross_entropy", "mc_forward_kl", "hybrid") and objective.tail != "drop"


seeds = st.integers(0, 2**31)
examples = settings(max_examples=10, deadline=None)


def assert_same(one, other, tolerance=1e-10):
    """Outputs with gradients that agree relative to their largest numbers."""
    (output, *gradients), (other_output, *other_gradients) = one, other
    pairs = [(output.loss, other_output.loss), (output.per_token, other_output.per_token)]
    for value, other_value in (*pairs, *zip(gradients, other_gradients, strict=True)):
        torch.testing.assert_close(value, other_value, rtol=0, atol=tolerance * max(1, other_value.abs().max().item()))


@objectives(lambda objective: not draws(objective))
def test_agrees_with_the_reference(objective):
    """Values, and gradients by plain autograd on full logits."""
    for seed, temperature in ((1, 1.0), (2, 0.7)):
        scene = build_scene(replace(objective, temperature=temperature), seed=seed, num_candidates=5)
        plain = replace(
            scene, hidden=scene.hidden.clone().requires_grad_(), weight=scene.weight.clone().requires_grad_()
        )
        values = plain.reference()
        (scene.token_weights * values).sum().div(len(values)).backward()
        output, grad_hidden, grad_weight = scene.gradients(logits_chunk_mb=600 / 2**20)
        torch.testing.assert_close(output.per_token, values.detach(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(grad_hidden, plain.hidden.grad, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(grad_weight, plain.weight.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", F_DIVERGENCES, ids=lambda kind: kind["kind"])
@pytest.mark.parametrize("support", ["teacher_topk", "student_topk"])
@given(seed=seeds, num_candidates=st.integers(1, 19), scale=st.floats(0.1, 4))
@examples
def test_the_bucket_keeps_a_divergence_between_zero_and_dense(kind, support, seed, num_candidates, scale):
    lower, upper = (
        build_scene(
            Objective(**kind, support=side, min_logprob=-1e4),  # a clamped teacher is no distribution
            seed=seed,
            num_candidates=num_candidates,
            scale=scale,
        )
        .loss()
        .per_token
        for side in (support, "dense")
    )
    assert (lower >= -1e-10).all()
    assert (lower <= upper + 1e-10).all()


@pytest.mark.parametrize("kind", SPARSE_DIVERGENCES, ids=lambda kind: kind["kind"])
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "drop"])
def test_a_support_of_the_whole_vocabulary_is_dense(kind, tail):
    for support in ("teacher_topk", "student_topk"):
        sparse = build_scene(Objective(**kind, support=support, tail=tail), seed=3, num_candidates=19)
        dense = build_scene(Objective(**kind, support="dense"), seed=3, num_candidates=19)
        assert_same(sparse.gradients(), dense.gradients())


@objectives(vanishes_at_teacher)
def test_a_student_that_is_the_teacher_has_nothing_to_learn(objective):
    """Every divergence and every advantage is 0, and so is the gradient."""
    scene = build_scene(objective, seed=4, teacher_is_student=True)
    output, grad_hidden, grad_weight = scene.gradients()
    # The slope of |q - p| jumps at 0: total variation's gradient there depends on the sign of rounding.
    largest = 0 if objective.kind == "total_variation" else max(grad_hidden.abs().max(), grad_weight.abs().max())
    assert output.per_token.abs().max() < 1e-12
    assert largest < 1e-12


@objectives(lambda objective: objective.support in (*TOP_K_SUPPORTS, "sampled") and objective.kind != "hybrid")
@given(seed=seeds)
@settings(max_examples=3, deadline=None)
def test_order_and_padding_of_candidates_do_not_matter(objective, seed):
    scene = build_scene(objective, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_candidates = scene.scores.ids.shape
    garbage = torch.full((num_rows, 3), torch.nan, dtype=torch.float64)
    order = torch.rand(num_rows, num_candidates + 3, generator=generator).argsort(-1)
    valid = torch.cat([torch.ones_like(scene.scores.ids, dtype=torch.bool), garbage == 0], dim=-1).gather(1, order)
    fields = {
        name: torch.cat([getattr(scene.scores, name), garbage], dim=-1).gather(1, order)
        for name in ("logprobs", "behavior_logprobs", "proximal_logprobs")
    }
    ids = torch.cat([scene.scores.ids, torch.full((num_rows, 3), 10**12)], dim=-1).gather(1, order)
    assert_same(scene.with_scores(ids=ids, valid=valid, **fields).gradients(), scene.gradients())


@objectives()
def test_chunks_do_not_matter(objective):
    scene = build_scene(objective, seed=5)
    assert_same(scene.gradients(logits_chunk_mb=ONE_ROW_MB), scene.gradients())
    torch.testing.assert_close(
        scene.loss(logits_chunk_mb=ONE_ROW_MB).metrics, scene.loss().metrics, rtol=1e-9, atol=1e-12
    )


@objectives(lambda objective: objective.correction != "m2po" and not draws(objective))  # these depend on all rows
def test_micro_batches_add_up_to_the_batch(objective):
    scene = build_scene(objective, seed=6)
    whole, grad_hidden, grad_weight = scene.gradients(num_tokens=11)
    parts = [scene.rows(rows).gradients(num_tokens=11) for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    torch.testing.assert_close(sum(part[0].loss for part in parts), whole.loss)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), grad_hidden)
    torch.testing.assert_close(sum(part[2] for part in parts), grad_weight)


@objectives(lambda objective: not draws(objective))
def test_rows_of_weight_zero_are_as_if_absent(objective):
    """Also for M2PO's bound, the default denominator and the metrics, and whatever stands in their scores."""
    scene = build_scene(objective, seed=7)
    kept = torch.tensor([0, 2, 3, 5])
    spoilt = torch.tensor([1, 4])
    fields = {}
    for name in ("ids", "labels", "logprobs", "tail_logprobs", "behavior_logprobs", "proximal_logprobs", "hidden"):
        value = getattr(scene.scores, name)
        if value is not None:
            garbage = torch.nan if value.is_floating_point() else 10**12
            fields[name] = value.index_fill(0, spoilt, garbage)
    masked = replace(
        scene.with_scores(**fields),
        hidden=scene.hidden.index_fill(0, spoilt, torch.nan),
        token_weights=scene.token_weights.index_fill(0, spoilt, 0),
    )
    output, grad_hidden, grad_weight = masked.gradients()
    alone, alone_grad_hidden, alone_grad_weight = scene.rows(kept).gradients()
    torch.testing.assert_close(output.loss, alone.loss)
    torch.testing.assert_close(output.per_token[kept], alone.per_token)
    torch.testing.assert_close(grad_hidden[kept], alone_grad_hidden)
    torch.testing.assert_close(grad_weight, alone_grad_weight)
    torch.testing.assert_close(output.metrics, alone.metrics)
    assert not output.per_token[spoilt].any()
    assert not grad_hidden[spoilt].any()


@objectives()
@pytest.mark.parametrize("temperature", [0.05, 1.0, 10.0])
def test_extreme_logits_stay_finite(objective, temperature):
    """Logits of +-1e4 before the temperature, in every precision that models come in."""
    objective = replace(objective, temperature=temperature)
    scene = build_scene(objective, seed=8, num_rows=8)
    spread = 1e4 / (scene.hidden @ scene.weight.T).abs().max()
    root = math.sqrt(spread)
    extreme = replace(scene, hidden=scene.hidden * root, weight=scene.weight * root)
    if scene.scores.hidden is not None:
        teacher = scene.scores
        extreme = extreme.with_scores(hidden=teacher.hidden * root, lm_head_weight=teacher.lm_head_weight * root)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        narrow = extreme.to(dtype)
        hidden, weight = narrow.hidden.requires_grad_(), narrow.weight.requires_grad_()
        output = narrow.loss(hidden, weight)
        (output.loss * 1e-12).backward()  # gradients that fit into float16
        values = {"loss": output.loss, "per_token": output.per_token, "hidden": hidden.grad, "weight": weight.grad}
        for name, value in (values | output.metrics).items():
            assert value.isfinite().all(), (dtype, name)


def test_nothing_to_train_on_gives_zero_and_zero_gradients():
    for objective in OBJECTIVES.values():
        scene = build_scene(objective, seed=9)
        for empty in (replace(scene, token_weights=torch.zeros(6, dtype=torch.float64)), scene.rows(slice(0, 0))):
            output, grad_hidden, grad_weight = empty.gradients()
            assert output.loss == 0
            assert grad_hidden.shape == empty.hidden.shape
            assert not grad_hidden.any()
            assert not grad_weight.any()
            assert output.metrics.keys() == scene.loss().metrics.keys()
            assert not any(value.any() for value in output.metrics.values())


def test_one_answer_of_one_token_trains_on_its_one_score():
    scene = build_scene(Objective("forward_kl"), num_rows=1)
    output, grad_hidden, _ = scene.gradients()
    torch.testing.assert_close(output.per_token, scene.reference())
    assert grad_hidden.abs().max() > 1e-3


def test_empty_scores_are_named():
    scene = build_scene(Objective("forward_kl"))
    with pytest.raises(ValueError, match=r"TeacherScores\.ids is missing"):
        replace(scene, scores=TeacherScores()).loss()

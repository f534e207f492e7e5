"""The precisions that models are trained in, through the compiled operators: float32 and bfloat16 against float64.

The other tests of this folder compute in float64, which the operators' plain PyTorch references serve.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.losses.scenes import OBJECTIVES, Scene, build_scene

# Not near a jump of their slopes (total variation, clips, HPD's weights) does rounding of logits change the side.
JUMPS = ("total_variation", "hybrid", "policy_gradient")


def exact(scene: Scene):
    """The values, and the gradients of the mean weighted value, by autograd through the reference in float64."""
    wide = scene.to(torch.float64)
    plain = replace(wide, hidden=wide.hidden.clone().requires_grad_(), weight=wide.weight.clone().requires_grad_())
    values = plain.reference()
    ((plain.token_weights * values).sum() / len(values)).backward()
    return values.detach(), plain.hidden.grad, plain.weight.grad


def assert_near(actual, expected, tolerance):
    """Relative to the largest number expected, or to 1."""
    bound = tolerance * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=bound)


@st.composite
def shapes(draw):
    """Of small problems: one row, one candidate, the whole vocabulary among them."""
    vocab = draw(st.integers(2, 40))
    return {
        "seed": draw(st.integers(0, 2**31)),
        "num_rows": draw(st.integers(1, 5)),
        "vocab": vocab,
        "hidden_size": draw(st.integers(1, 9)),
        "num_candidates": draw(st.sampled_from(sorted({1, vocab, vocab // 2 + 1}))),
        "scale": draw(st.sampled_from([0.1, 1.0])),
    }


def chosen(condition):
    objectives = {
        name: objective
        for name, objective in OBJECTIVES.items()
        if not (objective.kind == "hybrid" and objective.support == "dense") and condition(objective)  # that one draws
    }
    return pytest.mark.parametrize("objective", objectives.values(), ids=objectives.keys())


@chosen(lambda objective: True)
@given(shape=shapes(), rows_per_chunk=st.integers(1, 4))
@settings(max_examples=8, deadline=None)
def test_float32_is_the_reference(objective, shape, rows_per_chunk):
    scene = build_scene(objective, **shape).to(torch.float32)
    values, grad_hidden, grad_weight = exact(scene)
    output, hidden, weight = scene.gradients(logits_chunk_mb=rows_per_chunk * shape["vocab"] * 4 / 2**20)
    assert output.per_token.dtype == hidden.dtype == weight.dtype == torch.float32
    assert_near(output.per_token, values, 1e-5)
    assert_near(hidden, grad_hidden, 1e-5)
    assert_near(weight, grad_weight, 1e-5)


@chosen(lambda objective: objective.kind not in JUMPS)
@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_is_float32_but_for_its_rounding(objective, seed):
    """On the same rounded models; logits and their gradients are rounded to 8 bits once each."""
    scene = build_scene(objective, seed=seed, num_rows=24, vocab=40, hidden_size=16, scale=0.3).to(torch.bfloat16)
    narrow, *gradients = scene.gradients(logits_chunk_mb=8 * 40 * 2 / 2**20)
    wide, *expected = scene.to(torch.float32).gradients()
    logits = scene.hidden.float() @ scene.weight.float().T
    rounding = 2**-8 * logits.abs().max().item()  # of a difference of two logits
    assert_near(narrow.per_token, wide.per_token, 2 * rounding)
    for gradient, other in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient.float() - other).norm() <= rounding * other.norm() + 2**-8 * other.norm()


@chosen(lambda objective: True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows_give_zeros_of_the_models_type(objective, dtype):
    output, grad_hidden, grad_weight = build_scene(objective, num_rows=0).to(dtype).gradients()
    assert output.loss == 0
    assert (grad_hidden.shape, grad_hidden.dtype) == ((0, 5), dtype)
    assert grad_weight.dtype == dtype
    assert not grad_weight.any()

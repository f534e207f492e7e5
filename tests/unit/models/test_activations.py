"""RMSNorm and SwiGLU against the plain formulas, value and gradient, and what they keep for the backward pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from tests.helpers.tiny_models import make_tiny_model
from titan_opd.models import DecoderConfig
from titan_opd.models.activations import RMSNorm, made_again, swiglu
from titan_opd.models.decoder import FeedForward


def saved_elements(function):
    """How many elements autograd keeps, each storage counted once."""
    storages = {}
    with saved_tensors_hooks(lambda x: storages.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x):
        output = function()
    assert output.requires_grad
    return sum(x.numel() for x in storages.values())


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.floats(-3, 3), st.integers(0, 1000))
def test_rms_norm_is_the_formula(tokens, heads, size, scale, seed):
    torch.manual_seed(seed)
    norm = RMSNorm(size, eps=1e-5, dtype=torch.float64)
    norm.weight.data.normal_()
    x = (torch.randn(tokens, heads, size, dtype=torch.float64) * 10**scale).requires_grad_()
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    upstream = torch.randn_like(x)
    output = norm(x)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(output, (x, norm.weight), upstream)
    for got, wanted in zip(gradients, torch.autograd.grad(expected, (x, norm.weight), upstream), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_rms_norm_of_zeros_is_zero_with_a_finite_gradient():
    x = torch.zeros(2, 4, requires_grad=True)
    output = RMSNorm(4, eps=1e-6)(x)
    output.sum().backward()
    assert torch.equal(output, torch.zeros(2, 4))
    assert x.grad.isfinite().all()


def test_bfloat16_is_the_float32_result_rounded_once():
    norm = RMSNorm(64, eps=1e-6, dtype=torch.bfloat16)
    norm.weight.data.normal_()
    x = torch.randn(8, 64).bfloat16().requires_grad_()
    wide = x.detach().float().requires_grad_()
    expected = F.rms_norm(wide, (64,), norm.weight.float(), 1e-6)
    output = norm(x)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected.bfloat16(), rtol=0, atol=0)
    upstream = torch.randn(8, 64).bfloat16()
    output.backward(upstream)
    expected.backward(upstream.float())
    torch.testing.assert_close(x.grad, wide.grad.bfloat16(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_swiglu_is_the_formula(dtype):
    torch.manual_seed(0)
    gate, up = (torch.randn(5, 7, dtype=dtype).requires_grad_() for _ in range(2))
    expected = F.silu(gate) * up
    output = swiglu(gate, up)
    assert torch.equal(output, expected)
    upstream = torch.randn_like(gate)
    tolerance = 1e-12 if dtype == torch.float64 else 2**-6
    for got, wanted in zip(
        torch.autograd.grad(output, (gate, up), upstream),
        torch.autograd.grad(expected, (gate, up), upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_little_is_kept_for_the_backward_pass():
    x = torch.randn(16, 32, requires_grad=True)
    norm = RMSNorm(32, eps=1e-6)
    assert saved_elements(lambda: norm(x)) == 16 * 32 + 32 + 16
    gate, up = torch.randn(16, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    assert saved_elements(lambda: swiglu(gate, up)) == 2 * 16 * 32


def test_a_feed_forward_keeps_its_two_projections_and_not_their_product():
    config = DecoderConfig.from_dict(make_tiny_model(intermediate_size=64).config.to_dict())
    block = FeedForward(config)
    x = torch.randn(16, config.hidden_size, requires_grad=True)
    kept = saved_elements(lambda: block(x)) - sum(p.numel() for p in block.parameters()) - x.numel()
    assert kept <= 2 * 16 * 64


def test_a_tensor_is_made_again_once_for_all_that_kept_it_and_not_before():
    calls = []
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    first, second = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    doubled = 2 * x

    def make():
        calls.append(torch.is_grad_enabled())
        return 2 * x

    with made_again(doubled, make):
        output = doubled @ first + doubled @ second
    assert calls == []
    got = torch.autograd.grad(output.square().sum(), (x, first, second))
    assert calls == [False]
    plain = 2 * x @ first + 2 * x @ second
    for made, wanted in zip(got, torch.autograd.grad(plain.square().sum(), (x, first, second)), strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)


def test_recomputing_the_product_changes_no_gradient():
    config = DecoderConfig.from_dict(make_tiny_model(intermediate_size=64).config.to_dict())
    block = FeedForward(config).double()
    x = torch.randn(16, config.hidden_size, dtype=torch.float64, requires_grad=True)
    plain = block.down_proj(F.silu(block.gate_proj(x)) * block.up_proj(x))
    parameters = [x, *block.parameters()]
    upstream = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, parameters, upstream)
    for got, wanted in zip(torch.autograd.grad(block(x), parameters, upstream), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)

"""Packed attention against the formula, written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.varlen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from titan_opd.models import PackedAttention, attention, attention_backend


def formula(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """softmax(q k / sqrt(D)) v over the earlier tokens of the same sequence, for all packed tokens at once."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    seen = (sequence[:, None] == sequence) & torch.ones(len(query), len(query)).tril().bool()
    scores = torch.einsum("tnd,snd->nts", query, key) / query.shape[-1] ** 0.5
    return torch.einsum("nts,snd->tnd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def random_heads(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    return [
        torch.randn(num_tokens, heads, head_dim, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    ]


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any),
    short=st.sampled_from([0, 8 * 80, attention.SHORT]),  # none of the sequences padded, some, all
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    head_dim=st.sampled_from([2, 16, 20]),
)
def test_output_and_gradients_are_those_of_the_formula(lengths, short, heads, head_dim):
    inputs = random_heads(sum(lengths), *heads, head_dim)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SHORT", short)
        output = PackedAttention(cu_seqlens, max(lengths))(0, *inputs)
    expected = formula(*inputs, lengths)
    torch.testing.assert_close(output, expected, atol=1e-10, rtol=1e-10)
    probe = torch.arange(output.numel()).view_as(output) / output.numel()
    gradients = torch.autograd.grad((output * probe).sum(), inputs)
    for gradient, wanted in zip(gradients, torch.autograd.grad((expected * probe).sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-10, rtol=1e-10)


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    position=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_sequence_does_not_depend_on_what_it_is_packed_with(lengths, position, dtype):
    """To the bit: neither alone nor beside others, in whatever order, is it written or scored differently."""
    position %= len(lengths)
    inputs = [tensor.detach().to(dtype) for tensor in random_heads(sum(lengths), 4, 2, 32)]
    start = sum(lengths[:position])
    own = [tensor[start : start + lengths[position]] for tensor in inputs]
    together = PackedAttention(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))(0, *inputs)
    alone = PackedAttention(torch.tensor([0, lengths[position]]).int(), lengths[position])(0, *own)
    assert torch.equal(together[start : start + lengths[position]], alone)


def test_the_backend_is_stated():
    assert attention_backend("cpu", torch.bfloat16) == "sdpa"
    assert attention_backend("cuda", torch.float32) == "sdpa"
    assert attention_backend("cuda", torch.bfloat16) in ("flash_attn", "torch_varlen")


def kernel_of_today(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
    """Plays torch's kernel, which needs a GPU, by the formula."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert window_size == (-1, 0)
    assert torch.equal(cu_seq_q, cu_seq_k)
    lengths = cu_seq_q.diff().tolist()
    assert max_q == max_k == max(lengths)
    return formula(query, key, value, lengths)


def kernel_of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
    return kernel_of_today(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)


@pytest.mark.parametrize("kernel", [kernel_of_today, kernel_of_2_11])
def test_each_torch_is_asked_as_it_can_be(kernel, monkeypatch):
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", kernel)
    lengths = [5, 1, 9]
    inputs = random_heads(sum(lengths), 6, 2, 16)
    output = PackedAttention(torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))._torch_varlen(*inputs)
    torch.testing.assert_close(output, formula(*inputs, lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash_attn", "torch_varlen"])
def test_variable_length_kernels_agree_with_the_formula(backend):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if backend == "flash_attn":
        pytest.importorskip("flash_attn")
    lengths = [5, 1, 130, 64]
    exact = random_heads(sum(lengths), 8, 2, 64)
    expected = formula(*exact, lengths)
    half = [tensor.detach().cuda().bfloat16().requires_grad_() for tensor in exact]
    packed = PackedAttention(torch.tensor([0, *lengths]).cumsum(0).int().cuda(), max(lengths))
    output = getattr(packed, f"_{backend}")(*half)
    torch.testing.assert_close(output.double().cpu(), expected, atol=2e-2, rtol=2e-2)
    gradients = torch.autograd.grad(output.double().sum(), half)
    for gradient, wanted in zip(gradients, torch.autograd.grad(expected.sum(), exact), strict=True):
        torch.testing.assert_close(gradient.double().cpu(), wanted, atol=5e-2, rtol=5e-2)

"""The floating-point operations of a decoder: counted by PyTorch, and by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.arithmetic import make_decoder
from titan_opd.models import PackedAttention
from titan_opd.models.flops import (
    causal_pairs,
    forward_flops,
    layer_matrix_parameters,
    model_flops_per_token,
    training_flops,
)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_products_are_those_that_pytorch_counts(family):
    decoder = make_decoder(family, seed=0)
    num_tokens, num_rows = 12, 5
    positions = torch.arange(num_tokens)
    # Attention is not in PyTorch's count on the CPU, and its own test is below.
    expected = forward_flops(decoder.config, num_tokens=num_tokens, num_rows=num_rows, num_pairs=0)
    with FlopCounterMode(display=False) as counter:
        attention = PackedAttention(torch.tensor([0, num_tokens], dtype=torch.int32), num_tokens)
        hidden = decoder(positions, positions, attention)
        (hidden[:num_rows] @ decoder.lm_head_weight.T).sum()
    assert counter.get_total_flops() == expected


def test_training_is_three_forward_passes():
    decoder = make_decoder("llama", seed=0)
    num_tokens = 12
    positions = torch.arange(num_tokens)
    inputs = torch.randn(num_tokens, decoder.config.hidden_size)
    decoder.model.embed_tokens.register_forward_hook(lambda *_: inputs.requires_grad_())  # it has a gradient, too
    with FlopCounterMode(display=False) as counter:
        attention = PackedAttention(torch.tensor([0, num_tokens], dtype=torch.int32), num_tokens)
        (decoder(positions, positions, attention) @ decoder.lm_head_weight.T).sum().backward()
    # A sum over tokens in RMSNorm's backward pass is written as a batched product: elementwise work, not counted here.
    counted = sum(count for name, count in counter.get_flop_counts()["Global"].items() if name != torch.ops.aten.bmm)
    assert counted == training_flops(decoder.config, num_tokens=num_tokens, num_rows=num_tokens, num_pairs=0)


def test_attention_is_two_products_of_the_pairs_that_see_each_other():
    config = make_decoder("qwen3", seed=0).config
    lengths = [5, 1, 7]
    pairs = sum(key <= query for length in lengths for query in range(length) for key in range(length))
    assert causal_pairs(lengths) == pairs
    # A query and a key of D dimensions: D multiplications and additions; the weight with the value as many.
    expected = config.num_layers * config.num_heads * pairs * 2 * (2 * config.head_dim)
    assert forward_flops(config, num_tokens=0, num_rows=0, num_pairs=pairs) == expected


def test_the_matrices_are_all_parameters_but_vectors_and_vocabulary():
    decoder = make_decoder("qwen3", seed=0)
    matrices = sum(p.numel() for p in decoder.model.layers.parameters() if p.ndim == 2)
    assert layer_matrix_parameters(decoder.config) * decoder.config.num_layers == matrices


def test_six_operations_a_parameter_and_token_and_attention():
    config = make_decoder("llama", seed=0).config
    matrices = config.num_layers * layer_matrix_parameters(config) + config.vocab_size * config.hidden_size
    length = 9
    attention = 12 * config.num_layers * config.num_heads * config.head_dim * (length + 1) / 2
    assert model_flops_per_token(config, length) == 6 * matrices + attention

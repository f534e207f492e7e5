"""Floating-point operations of a decoder, from its shape and the lengths of its sequences.

Counted are products of matrices, 2 operations for each multiplication with its addition: those with parameters (the
embedding is a look-up, and norms and biases are no products), the output projection of the rows that are projected, and
the two products of attention, of the pairs that the causal mask lets see each other. Elementwise work is left out. What
is counted is what the model needs, not what an implementation computes: nothing that is computed again for the
backward pass, and of attention no masked pair. That is the numerator of MFU (arXiv 2204.02311, appendix B, which counts
masked pairs, too).

The backward pass of a product is two products of its size, so training is three forward passes. The fused loss head
takes its three products in the forward pass; the count is the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from titan_opd.models.config import DecoderConfig


def layer_matrix_parameters(config: DecoderConfig) -> int:
    """Parameters of one layer that are factors of products: its seven projections without biases."""
    query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * query_size + 2 * key_size)  # query and output; key and value
    return attention + 3 * config.hidden_size * config.intermediate_size  # gate, up, down


def causal_pairs(lengths: Iterable[int]) -> int:
    """Pairs of a token and one that it sees, itself included, within sequences of these numbers of tokens."""
    return sum(length * (length + 1) // 2 for length in lengths)


def forward_flops(config: DecoderConfig, *, num_tokens: int, num_rows: int, num_pairs: int) -> int:
    """Of a forward pass, without a backward pass to follow: scoring, a prompt read, a token decoded.

    Args:
        config: of the decoder.
        num_tokens: that go through the layers.
        num_rows: tokens whose logits are computed.
        num_pairs: of tokens that attention compares, `causal_pairs` of the sequences; a token decoded after n others
            adds n + 1.
    """
    layers = 2 * config.num_layers * layer_matrix_parameters(config) * num_tokens
    attention = 2 * 2 * config.num_layers * config.num_heads * config.head_dim * num_pairs
    return layers + attention + 2 * config.vocab_size * config.hidden_size * num_rows


def training_flops(config: DecoderConfig, *, num_tokens: int, num_rows: int, num_pairs: int) -> int:
    """Of a forward and a backward pass; arguments as `forward_flops`, `num_rows` being the trained tokens."""
    return 3 * forward_flops(config, num_tokens=num_tokens, num_rows=num_rows, num_pairs=num_pairs)


def model_flops_per_token(config: DecoderConfig, length: int) -> float:
    """Of training on a sequence of `length` tokens all of which are trained, divided by them."""
    return training_flops(config, num_tokens=length, num_rows=length, num_pairs=causal_pairs([length])) / length

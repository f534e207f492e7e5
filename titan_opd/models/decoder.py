"""One decoder for Llama, Qwen2/2.5 and Qwen3; parameters carry Hugging Face's names.

Tokens of all sequences stand side by side in one dimension; what separates the sequences is the `Attention` that the
caller passes in.

Shape suffixes: T packed tokens, H hidden size, N query heads, M key-value heads, D dimensions of a head, F = D / 2,
I intermediate size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from titan_opd.models.activations import RMSNorm, made_again, swiglu
from titan_opd.models.attention import Attention
from titan_opd.models.config import DecoderConfig
from titan_opd.models.rope import rope_cos_sin, rotate


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions: [T, H] in, [T, H] out."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, x_TH: Tensor, cos_T1F: Tensor, sin_T1F: Tensor, attention: Attention) -> Tensor:
        # The number of heads is left to the tensor: under tensor parallelism a rank has its share of them.
        query_TND = self.q_proj(x_TH).unflatten(-1, (-1, self.head_dim))
        key_TMD = self.k_proj(x_TH).unflatten(-1, (-1, self.head_dim))
        value_TMD = self.v_proj(x_TH).unflatten(-1, (-1, self.head_dim))
        if self.qk_norm:
            query_TND, key_TMD = self.q_norm(query_TND), self.k_norm(key_TMD)
        query_TND, key_TMD = rotate(query_TND, cos_T1F, sin_T1F), rotate(key_TMD, cos_T1F, sin_T1F)
        return self.o_proj(attention(self.layer, query_TND, key_TMD, value_TMD).flatten(-2))


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)): [T, H] in, [T, H] out."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_TH: Tensor, *, keep_product: bool = False) -> Tensor:
        gate_TI, up_TI = self.gate_proj(x_TH), self.up_proj(x_TH)
        product_TI = swiglu(gate_TI, up_TI)
        with nullcontext() if keep_product else made_again(product_TI, lambda: swiglu(gate_TI, up_TI)):
            return self.down_proj(product_TI)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind an RMSNorm and added to its input: [T, H] in, [T, H] out.

    Attributes:
        checkpoint: calls a function and keeps less for the backward pass than the function would; None: a plain call.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.checkpoint: Callable[..., Tensor] | None = None

    def forward(self, x_TH: Tensor, cos_T1F: Tensor, sin_T1F: Tensor, attention: Attention) -> Tensor:
        inputs = (x_TH, cos_T1F, sin_T1F, attention)
        if self.checkpoint is not None and torch.is_grad_enabled():
            return self.checkpoint(self.compute, *inputs)
        return self.compute(*inputs)

    def compute(self, x_TH: Tensor, cos_T1F: Tensor, sin_T1F: Tensor, attention: Attention) -> Tensor:
        """What `forward` does, whether or not it is computed again."""
        # Where the layer is computed again for the backward pass, recipes would hold tensors that it lets go; and a
        # compiler decides by itself what it computes again.
        keep = self.checkpoint is not None or torch.compiler.is_compiling()
        normed_TH = self.input_layernorm(x_TH)
        with nullcontext() if keep else made_again(normed_TH, lambda: self.input_layernorm(x_TH)):
            attended_TH = x_TH + self.self_attn(normed_TH, cos_T1F, sin_T1F, attention)
        normed_TH = self.post_attention_layernorm(attended_TH)
        with nullcontext() if keep else made_again(normed_TH, lambda: self.post_attention_layernorm(attended_TH)):
            return attended_TH + self.mlp(normed_TH, keep_product=keep)


class Trunk(nn.Module):
    """The decoder without its output projection: what Hugging Face's names put under `model.`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        config = self.config
        x_TH = self.embed_tokens(input_ids_T)
        rope = rope_cos_sin(positions_T, config.head_dim, config.rope_theta, config.rope_scaling, x_TH.dtype)
        for layer in self.layers:
            x_TH = layer(x_TH, *rope, attention)
        return self.norm(x_TH)


class Decoder(nn.Module):
    """A causal language model that returns hidden states.

    The product with the vocabulary is the caller's (`lm_head_weight`): the loss and the scorers take it in chunks and
    for the rows they need.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """Hidden states after the final norm.

        Args:
            input_ids_T: [T] int64.
            positions_T: [T] int64, from 0 within each sequence.
            attention: how the tokens see each other.

        Returns:
            [T, H] in the parameters' dtype.
        """
        return self.model(input_ids_T, positions_T, attention)

    @property
    def lm_head_weight(self) -> nn.Parameter:
        """[V, H], the output projection; the embedding when the two are tied."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Draw the weights as `initial_weights` says.

        Args:
            generator: of the parameters' device.
        """
        parameters = dict(self.named_parameters())
        for name, weight in self.initial_weights(generator):
            parameters[name].copy_(weight)

    def initial_weights(self, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, as Hugging Face draws it: matrices normal with `initializer_range`, norms 1, biases 0.

        Args:
            generator: says on which device they are made.
        """
        for name, parameter in self.named_parameters():
            weight = torch.empty(parameter.shape, dtype=parameter.dtype, device=generator.device)
            if parameter.ndim == 2:
                weight.normal_(0.0, self.config.initializer_range, generator=generator)
            else:
                weight.fill_(0.0 if name.endswith(".bias") else 1.0)
            yield name, weight

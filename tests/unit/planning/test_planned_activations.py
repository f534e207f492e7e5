"""What a layer keeps for its backward pass: the formula against the allocator."""

from __future__ import annotations

import pytest
import torch
from check_plan import count_allocations

from tests.helpers.arithmetic import make_decoder
from titan_opd.models import PackedAttention, attention
from titan_opd.models.decoder import DecoderLayer
from titan_opd.models.rope import rope_cos_sin
from titan_opd.planning.activations import Workload, kept_tensors, layer_memory
from titan_opd.planning.parts import Grid

LENGTHS = [7, 5, 9]
NUM_TOKENS = sum(LENGTHS)


def kept_bytes(layer: DecoderLayer, lengths: list[int]) -> int:
    """That are still allocated after a layer's forward pass, its input among them and its output not."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    rope = rope_cos_sin(positions, layer.self_attn.head_dim, 10_000.0, None, torch.float32)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    packed = PackedAttention(cu_seqlens, max(lengths))
    with count_allocations() as found:
        x = torch.randn(len(positions), layer.input_layernorm.weight.shape[0], requires_grad=True)
        output = layer(x, *rope, packed)
    return found.end - output.numel() * output.element_size()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("lengths", [LENGTHS, [8, 8], [21]])
def test_a_layer_keeps_what_the_formula_says(family, lengths, monkeypatch):
    monkeypatch.setattr(attention, "SHORT", 0)  # sequences as they are, like those of a real model
    decoder = make_decoder(family, seed=0)
    config = decoder.config
    work = Workload(sum(lengths), sum(lengths), separate_calls=len(set(lengths)) > 1)
    expected = sum(kept_tensors(config, work, Grid(), itemsize=4, made_again=True).values())
    found = kept_bytes(decoder.model.layers[0], lengths)
    # Attention keeps the state of a random generator, too: two integers of 8 bytes a call.
    assert 0 <= found - expected <= 16 * len(lengths)


def test_a_layer_that_is_computed_again_keeps_its_input():
    config = make_decoder("llama", seed=0).config
    work = Workload(NUM_TOKENS, NUM_TOKENS)
    memory = {
        mode: layer_memory(config, work, Grid(), itemsize=4, recompute=mode) for mode in ("none", "selective", "full")
    }
    stream = NUM_TOKENS * config.hidden_size * 4
    assert memory["full"].kept == stream
    attention = NUM_TOKENS * config.num_heads * (config.head_dim + 1) * 4
    assert memory["selective"].kept == stream + attention
    assert memory["full"].whole > memory["none"].whole  # inputs of projections are not made again then


def test_narrow_layers_keep_half_and_a_cast_of_the_angles():
    config = make_decoder("llama", seed=0).config
    work = Workload(NUM_TOKENS, NUM_TOKENS)
    wide, narrow = (kept_tensors(config, work, Grid(), itemsize=itemsize, made_again=True) for itemsize in (4, 2))
    assert 2 * narrow["gate, up"] == wide["gate, up"]
    assert narrow["norms"] == wide["norms"]  # one float32 a row
    angles = NUM_TOKENS * config.head_dim * 2
    memory = layer_memory(config, work, Grid(), itemsize=2, recompute="none")
    assert memory.kept == sum(narrow.values()) + angles

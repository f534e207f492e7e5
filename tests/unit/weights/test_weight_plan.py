"""Plans for fused and tensor-parallel storage, held against tensors that are cut and stacked by hand."""

from __future__ import annotations

import pytest
import torch

from titan_opd.models import DecoderConfig
from titan_opd.weights.pieces import Piece
from titan_opd.weights.plan import fused_plan, identity_plan, weight_specs

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 128,
}
FAMILIES = ("llama", "qwen2", "qwen3")


def make_config(family, **changes):
    return DecoderConfig.from_dict(SHAPE | {"model_type": family} | changes)


def random_weights(config):
    return {name: torch.randn(spec.shape) for name, spec in weight_specs(config, torch.float32).items()}


def pieces_of(weights, rows):
    for name, value in weights.items():
        for first in range(0, value.shape[0], rows):
            yield Piece(name, first, value[first : first + rows])


def filled(plan, weights, rows):
    storage = {name: torch.full(shape, torch.nan) for name, shape in plan.shapes.items()}
    for source, destination in plan.copies(list(pieces_of(weights, rows)), storage):
        assert destination.isnan().all(), "a place is filled twice"
        destination.copy_(source)
    return storage


def by_hand(config, weights, rank, num_ranks):
    """Each fused parameter, from whole tensors seen as heads and units."""
    result = {}

    def heads(name, count):
        value = weights[name].unflatten(0, (count, config.head_dim))
        if count >= num_ranks:
            return value.chunk(num_ranks)[rank].flatten(0, 1)
        return value[rank // (num_ranks // count)]

    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            counts = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads, "v_proj": config.num_kv_heads}
            parts = [heads(f"{prefix}.self_attn.{one}.{kind}", count) for one, count in counts.items()]
            result[f"{prefix}.self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        halves = [weights[f"{prefix}.mlp.{one}_proj.weight"].chunk(num_ranks)[rank] for one in ("gate", "up")]
        result[f"{prefix}.mlp.gate_up_proj.weight"] = torch.cat(halves)
        for name in (f"{prefix}.self_attn.o_proj.weight", f"{prefix}.mlp.down_proj.weight"):
            result[name] = weights[name].chunk(num_ranks, dim=1)[rank]
    for name, value in weights.items():
        if "norm" in name:
            result[name] = value
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            padded = torch.cat([value, torch.full((128 - len(value), value.shape[1]), torch.nan)])
            result[name] = padded.chunk(num_ranks)[rank]
    return result


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_storage_is_what_is_stacked_by_hand(family, num_ranks, tied):
    config = make_config(family, tie_word_embeddings=tied)
    weights = random_weights(config)
    assert ("lm_head.weight" in weights) is not tied
    for rank in range(num_ranks):
        plan = fused_plan(config, torch.float32, rank=rank, num_ranks=num_ranks)
        expected = by_hand(config, weights, rank, num_ranks)
        for rows in (1, 7, 1000):
            storage = filled(plan, weights, rows)
            assert storage.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(storage[name], value, atol=0, rtol=0, equal_nan=True, msg=name)
        for name, value in weights.items():  # what is read back is what this rank was to take
            assert torch.equal(plan.stored(name, storage), plan.expected(name, value)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_identity_plan_is_the_weights(family):
    config = make_config(family)
    weights = random_weights(config)
    storage = filled(identity_plan(config, torch.float32), weights, 5)
    assert storage.keys() == weights.keys()
    assert all(torch.equal(storage[name], value) for name, value in weights.items())


def test_a_rank_beyond_the_vocabulary_has_padding_only():
    config = make_config("llama", vocab_size=20)
    plan = fused_plan(config, torch.float32, rank=3, num_ranks=4)
    storage = filled(plan, random_weights(config), 6)
    assert storage["model.embed_tokens.weight"].shape == (16, 32)
    assert storage["model.embed_tokens.weight"].isnan().all()


@pytest.mark.parametrize("num_ranks", [3, 16])
def test_ranks_that_cannot_share_are_refused(num_ranks):
    with pytest.raises(ValueError, match=f"{num_ranks} ranks cannot share 8 heads"):
        fused_plan(make_config("llama"), torch.float32, rank=0, num_ranks=num_ranks)
    with pytest.raises(ValueError, match="ranks count from 0"):
        fused_plan(make_config("llama"), torch.float32, rank=2, num_ranks=2)

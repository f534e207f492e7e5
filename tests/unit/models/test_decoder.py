"""The decoder against transformers' own models."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.tiny_models import make_tiny_checkpoint, make_tiny_model
from titan_opd.models import Decoder, DecoderConfig, PackedAttention, load_decoder
from titan_opd.parallel.checkpointing import apply_activation_checkpointing

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,  # a small base and context put frequencies on both sides of both factors
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "llama": ("llama", {}),
    "llama, one head each": ("llama", {"num_key_value_heads": 4}),
    "llama, one key-value head": ("llama", {"num_key_value_heads": 1, "num_hidden_layers": 1}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, wide heads": ("llama", {"head_dim": 20}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, rope base": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
}


def packed(lengths: list[int]) -> tuple[torch.Tensor, PackedAttention]:
    """Positions and attention for sequences of these lengths, side by side."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return positions, PackedAttention(cu_seqlens, max(lengths))


def logits_of(decoder: Decoder, input_ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    positions, attention = packed(lengths)
    return decoder(input_ids, positions, attention) @ decoder.lm_head_weight.T


def random_ids(count: int, vocab_size: int = 101, seed: int = 1) -> torch.Tensor:
    """Ids without 0, the padding token, whose embedding transformers gives no gradient."""
    return torch.randint(1, vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("family", "overrides"), VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_and_every_gradient_are_those_of_transformers(tmp_path, family, overrides):
    reference = make_tiny_model(family, **overrides)
    reference.save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path)
    input_ids = random_ids(90)
    probe = torch.randn(90, 101, generator=torch.Generator().manual_seed(2))

    expected = reference(input_ids[None]).logits[0]
    logits = logits_of(decoder, input_ids, [90])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    (expected.log_softmax(-1) * probe).mean().backward()
    (logits.log_softmax(-1) * probe).mean().backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert gradients.keys() == dict(decoder.named_parameters()).keys()
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-6, rtol=1e-4, msg=lambda m, n=name: n + m)
        assert parameter.grad.abs().max() > 0, name


def test_bfloat16_rounds_like_transformers(tmp_path):
    reference = make_tiny_model("qwen3")
    reference.save_pretrained(tmp_path)
    input_ids = random_ids(40)
    exact = reference(input_ids[None]).logits[0]
    theirs = reference.bfloat16()(input_ids[None]).logits[0].float()
    ours = logits_of(load_decoder(tmp_path, dtype=torch.bfloat16), input_ids, [40])
    assert ours.dtype == torch.bfloat16
    # Both are bfloat16 roundings of the same numbers: ours must not be further from them.
    assert (ours.float() - exact).norm() < 1.2 * (theirs - exact).norm()


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 2**16))
def test_packed_sequences_do_not_see_each_other(qwen3_decoder, lengths, seed):
    input_ids = random_ids(sum(lengths), seed=seed)
    together = logits_of(qwen3_decoder, input_ids, lengths)
    for sequence, logits in zip(input_ids.split(lengths), together.split(lengths), strict=True):
        torch.testing.assert_close(logits, logits_of(qwen3_decoder, sequence, [len(sequence)]), atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def qwen3_decoder(tmp_path_factory) -> Decoder:
    return load_decoder(make_tiny_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3"))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_leaves_output_and_gradients_equal_and_keeps_less(qwen3_decoder, mode):
    input_ids, lengths = random_ids(70), [30, 40]
    recomputing = copy.deepcopy(qwen3_decoder)
    apply_activation_checkpointing(recomputing, mode)
    saved_bytes = {}
    for name, decoder in (("plain", qwen3_decoder), ("recomputing", recomputing)):
        decoder.zero_grad()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=saved: s.append(x.nbytes) or x, lambda x: x):
            logits = logits_of(decoder, input_ids, lengths)
        saved_bytes[name] = sum(saved)
        logits.square().mean().backward()
    for (name, expected), parameter in zip(qwen3_decoder.named_parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad), name
    assert saved_bytes["recomputing"] < saved_bytes["plain"]


def test_a_decoder_is_built_on_the_meta_device_and_given_storage_later(qwen3_decoder):
    with torch.device("meta"):
        decoder = Decoder(qwen3_decoder.config)
    assert {parameter.device.type for parameter in decoder.parameters()} == {"meta"}
    assert not list(decoder.buffers())
    decoder.to_empty(device="cpu")
    decoder.load_state_dict(qwen3_decoder.state_dict())
    input_ids = random_ids(9)
    assert torch.equal(logits_of(decoder, input_ids, [9]), logits_of(qwen3_decoder, input_ids, [9]))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_random_weights_have_the_statistics_of_transformers(family):
    shape = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 999, "initializer_range": 0.05}
    model = make_tiny_model(family, **shape)
    reference = transformers.AutoModelForCausalLM.from_config(model.config)
    decoder = Decoder(DecoderConfig.from_dict(model.config.to_dict()))
    decoder.init_weights(torch.Generator().manual_seed(3))
    expected = dict(reference.named_parameters())
    for name, parameter in decoder.named_parameters():
        # two samples of n normal values each: the difference's standard error is below std * sqrt(2 / n)
        bound = 6 * float(expected[name].std()) * math.sqrt(2 / parameter.numel())
        assert abs(parameter.mean() - expected[name].mean()) <= bound, name
        assert abs(parameter.std() - expected[name].std()) <= bound, name
    again = Decoder(decoder.config)
    again.init_weights(torch.Generator().manual_seed(3))
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), again.parameters(), strict=True))

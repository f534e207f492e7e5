"""Linear layers that multiply in float8, emulated: what is rounded how, which layers, and what is refused."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from tests.distributed.cases import OBJECTIVES, make_batches, uneven_trajectories
from tests.helpers.arithmetic import VOCAB_SIZE, make_decoder
from titan_opd.config.float8 import Float8Config
from titan_opd.config.schema import OptimizerConfig, TrainingConfig
from titan_opd.learner import DistillationModel, Learner
from titan_opd.parallel import open_world, parallelize
from titan_opd.parallel.float8 import apply_float8, describe_float8, plain_products, reasons_against

RECIPES = ("tensorwise", "rowwise")
GRADIENT_DTYPE = {"tensorwise": torch.float8_e5m2, "rowwise": torch.float8_e4m3fn}


def emulated(recipe):
    return Float8Config(recipe=recipe, emulate=True)


def make_float8(recipe, *, tp=1, **shape):
    decoder = make_decoder("qwen3", seed=0, **{"head_dim": 16} | shape)
    apply_float8(decoder, emulated(recipe), tp=tp, device_type="cpu")
    return decoder


def rounded(matrix, dim, recipe, dtype=torch.float8_e4m3fn):
    """`matrix`, float64, with the digits of float8: scaled by a power of two that brings the largest magnitude, of all
    or along `dim`, just below float8's largest, rounded, and scaled back."""
    largest = matrix.abs().max() if recipe == "tensorwise" else matrix.abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / largest)))
    return (matrix * scale).float().to(dtype).double() / scale


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("num_tokens", [5, 32])
def test_the_three_products_are_those_of_rounded_operands(recipe, num_tokens):
    layer = make_float8(recipe).model.layers[0].mlp.gate_proj
    x = torch.randn(num_tokens, 32, requires_grad=True)
    grad = torch.randn(num_tokens, 48)
    output = layer(x)
    output.backward(grad)

    x64, weight, grad64 = x.detach().double(), layer.weight.detach().double(), grad.double()
    kind = GRADIENT_DTYPE[recipe]
    expected = rounded(x64, 1, recipe) @ rounded(weight, 1, recipe).T
    expected_x = rounded(grad64, 1, recipe, kind) @ rounded(weight, 0, recipe)
    expected_weight = rounded(grad64, 0, recipe, kind).T @ rounded(x64, 0, recipe)
    for found, wanted in ((output, expected), (x.grad, expected_x), (layer.weight.grad, expected_weight)):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)

    # Three bits after the leading one round by up to 1/16, two by up to 1/8; in a sum of many, by less.
    plain = x64 @ weight.T
    assert 0.01 < (expected - plain).norm() / plain.norm() < 1 / 16
    plain = grad64.T @ x64
    assert 0.01 < (expected_weight - plain).norm() / plain.norm() < 1 / 8


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bias_is_added_unrounded(recipe):
    decoder = make_decoder("llama", seed=0, model_type="qwen2", hidden_size=64)
    apply_float8(decoder, emulated(recipe), tp=1, device_type="cpu")
    layer = decoder.model.layers[0].self_attn.q_proj
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(3, 64)
    expected = rounded(x.double(), 1, recipe) @ rounded(layer.weight.detach().double(), 1, recipe).T
    torch.testing.assert_close(layer(x).double(), expected + layer.bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_powers_of_two_are_not_rounded_at_all(recipe):
    layer = make_float8(recipe).model.layers[0].mlp.gate_proj
    with torch.no_grad():
        layer.weight.copy_(2.0 ** torch.randint(-3, 3, layer.weight.shape))
    x = 2.0 ** torch.randint(-3, 3, (7, 32))
    assert torch.equal(layer(x), x @ layer.weight.T)


def test_parameters_keep_their_names_and_values():
    plain, decoder = make_decoder("qwen3", seed=0, head_dim=16), make_float8("rowwise")
    assert [name for name, _ in decoder.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for (_, left), (_, right) in zip(decoder.named_parameters(), plain.named_parameters(), strict=True):
        assert type(left) is torch.nn.Parameter
        assert torch.equal(left, right)


def test_only_layers_with_multiples_of_16_on_each_process_are_changed():
    decoder = make_float8("rowwise", tp=2, num_hidden_layers=3)
    changed = {name for name, module in decoder.named_modules() if type(module).__name__ == "Float8Linear"}
    attention, feed_forward = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    assert changed == {f"model.layers.{layer}.self_attn.{name}" for layer in range(3) for name in attention}
    (line,) = describe_float8(decoder, emulated("rowwise"), tp=2)
    assert line == (
        "float8 (rowwise, emulated): self_attn.q_proj, self_attn.k_proj, self_attn.v_proj, self_attn.o_proj of each "
        "layer; not mlp.gate_proj (24 outputs on a process, no multiple of 16), mlp.up_proj (24 outputs on a process, "
        "no multiple of 16), mlp.down_proj (24 inputs on a process, no multiple of 16); not embedding and output "
        "projection"
    )
    assert not any(reasons_against(decoder, tp=1).values())
    assert all(reasons_against(decoder, tp=2)[f"mlp.{name}"] for name in feed_forward)
    assert describe_float8(decoder, Float8Config(), tp=2) == []


def test_plain_products_are_those_without_float8():
    layer = (decoder := make_float8("rowwise")).model.layers[0].mlp.gate_proj
    x = torch.randn(3, 32)
    with plain_products(decoder):
        assert torch.equal(layer(x), x @ layer.weight.T)
    assert not torch.allclose(layer(x), x @ layer.weight.T, rtol=1e-3)


def test_where_no_device_has_float8_it_is_refused_unless_emulated():
    with pytest.raises(ValueError, match=r"'rowwise' needs a GPU of compute capability 8\.9 .* no GPU; .*emulate"):
        apply_float8(make_decoder("qwen3", seed=0), Float8Config(recipe="rowwise"), tp=1, device_type="cpu")


def test_an_old_device_is_refused_and_a_new_one_is_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match=r"an A100 has compute capability 8\.0"):
        apply_float8(make_decoder("qwen3", seed=0), Float8Config(recipe="rowwise"), tp=1, device_type="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    apply_float8(make_decoder("qwen3", seed=0), Float8Config(recipe="rowwise"), tp=1, device_type="cuda")


def test_a_student_without_a_layer_for_it_is_refused():
    decoder = make_decoder("llama", seed=0, hidden_size=40, intermediate_size=56, head_dim=10)
    with pytest.raises(ValueError, match=r"no linear layer .* mlp\.down_proj \(56 inputs and 40 outputs, no multiple"):
        apply_float8(decoder, emulated("rowwise"), tp=1, device_type="cpu")


def test_without_torchao_it_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ValueError, match=r"recipe = 'rowwise' needs torchao 0\.18.* pip install 'titan_opd\[float8\]'"):
        apply_float8(make_decoder("qwen3", seed=0), emulated("rowwise"), tp=1, device_type="cpu")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Float8Config(recipe="row"), r"float8\.recipe = 'row' is not one of"),
        (lambda: Float8Config(emulate=True), r"float8\.emulate = true has no effect"),
        (
            lambda: TrainingConfig(steps=1, float8=Float8Config(recipe="tensorwise")),
            r"products in bfloat16, and training\.compute_dtype = 'float32'",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    TrainingConfig(steps=1, float8=Float8Config(recipe="tensorwise"), compute_dtype="bfloat16")


@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_are_finite_for_zeros_and_for_large_numbers(recipe):
    layer = make_float8(recipe).model.layers[0].mlp.gate_proj
    assert torch.equal(layer(torch.zeros(2, 32)), torch.zeros(2, 48))
    largest = layer(torch.full((2, 32), 1e30)).detach().abs().max().item()
    assert math.isfinite(largest)
    assert largest > 1e28


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_answers_are_learnt_better_step_by_step(recipe):
    objective = OBJECTIVES["forward_kl"]
    with open_world() as world:
        decoder = make_decoder("qwen3", seed=0, head_dim=16)
        model = DistillationModel(decoder, vocab_size=VOCAB_SIZE, logits_chunk_mb=1)
        parallelize(model, decoder, world.mesh, TrainingConfig(steps=1, float8=emulated(recipe)))
        optimizer = OptimizerConfig(learning_rate=1e-2, decay="constant")
        learner = Learner(model, objective, optimizer, num_steps=8, seed=0, world=world)
        batches = make_batches(uneven_trajectories(0), objective, world)
        losses = [learner.step(batches, current_version=0)["loss"] for _ in range(8)]
    assert losses[-1] < 0.6 * losses[0]

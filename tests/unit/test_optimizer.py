"""Learning-rate schedule, weight decay's groups, clipping."""

import copy
import itertools
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.helpers.arithmetic import make_decoder
from titan_opd.config.schema import OptimizerConfig
from titan_opd.muon import orthogonalize
from titan_opd.optimizer import build_optimizer, clip_gradients, learning_rate, set_learning_rate


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_warm_up_peak_and_last_step(decay):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, decay=decay, final_fraction=0.25)
    rates = [learning_rate(step, 20, config) for step in range(20)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[-1] == pytest.approx(1.0 if decay == "constant" else 0.25)


def test_halfway_of_the_decay():
    config = OptimizerConfig(learning_rate=2.0, decay="linear", final_fraction=0.0)
    assert learning_rate(5, 11, config) == pytest.approx(1.0)
    config = OptimizerConfig(learning_rate=2.0, decay="cosine", final_fraction=0.5)
    assert learning_rate(5, 11, config) == pytest.approx(1.5)


@given(
    st.integers(1, 50),
    st.integers(0, 60),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.floats(0, 1),
)
def test_the_rate_stays_between_zero_and_its_peak_and_never_rises_after_warm_up(num_steps, warmup, decay, final):
    config = OptimizerConfig(learning_rate=3.0, warmup_steps=warmup, decay=decay, final_fraction=final)
    rates = [learning_rate(step, num_steps, config) for step in range(num_steps)]
    assert all(0 <= rate <= 3.0 + 1e-12 for rate in rates)
    after = rates[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))


def test_only_matrices_decay_and_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    model[0].bias.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.1))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {id(model[0].weight): 0.1, id(model[1].weight): 0.0, id(model[1].bias): 0.0}


@pytest.mark.parametrize(("max_norm", "expected"), [(1.0, 1.0), (0.0, 5.0), (10.0, 5.0)])
def test_clipping_bounds_the_global_norm_and_zero_leaves_it(max_norm, expected):
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_gradients(parameters, max_norm).item() == pytest.approx(5.0)
    norm = torch.stack([parameter.grad for parameter in parameters]).norm()
    assert norm.item() == pytest.approx(expected, rel=1e-5)


def test_orthogonalized_matrices_have_singular_values_near_one():
    for shape in ((8, 8), (5, 12), (12, 5)):
        singular_values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, dtype=torch.float64)))
        assert singular_values.min() > 0.3, shape
        assert singular_values.max() < 1.3, shape


def test_orthogonalization_keeps_the_singular_vectors():
    matrix = torch.randn(6, 9, dtype=torch.float64)
    u, _, v_T = torch.linalg.svd(matrix, full_matrices=False)
    core = u.T @ orthogonalize(matrix) @ v_T.T
    torch.testing.assert_close(core, core.diagonal().diag(), atol=1e-12, rtol=0)


def test_muon_updates_matrices_within_layers_as_torch_s_and_the_rest_as_adamw():
    config = OptimizerConfig(
        name="muon", learning_rate=0.01, weight_decay=0.1, momentum=0.9, muon_dtype="float32", betas=(0.9, 0.95)
    )
    ours = make_decoder("qwen3", seed=0)
    theirs = copy.deepcopy(ours)
    optimizer = build_optimizer(ours, config)
    vocabulary = ("model.embed_tokens.weight", "lm_head.weight")
    parameters = dict(theirs.named_parameters())
    inner = [value for name, value in parameters.items() if value.ndim == 2 and name not in vocabulary]
    norms = [value for value in parameters.values() if value.ndim == 1]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": config.eps}
    references = [
        torch.optim.Muon(inner, lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([parameters[name] for name in vocabulary], weight_decay=0.1, **options),
        torch.optim.AdamW(norms, weight_decay=0.0, **options),
    ]
    for _ in range(3):
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        optimizer.step()
        for reference in references:
            reference.step()
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # PyTorch's has the momentum of an average and takes its products in bfloat16.
        atol = 1e-6 if own.ndim == 1 or name in vocabulary else 3 * 0.01 * 0.2 * own.shape[-1] ** 0.5 * 0.05
        torch.testing.assert_close(own, other, atol=atol, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.fixture
def without_compiler():
    """torchao's step is compiled for each shape, for minutes; uncompiled it computes the same."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def train_pair(shape, steps, **options):
    """The same start and the same gradients with moments of 32 and of 8 bits; parameters and optimizers."""
    torch.manual_seed(0)
    start = torch.randn(shape)
    parameters = [nn.Parameter(start.clone()) for _ in range(2)]
    names = ("adamw", "adamw_8bit")
    optimizers = [
        build_optimizer(nn.ParameterList([parameter]), OptimizerConfig(name=name, weight_decay=0.1, **options))
        for parameter, name in zip(parameters, names, strict=True)
    ]
    slope = torch.randn(shape)
    for step in range(steps):
        gradient = slope + torch.randn(shape)
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            set_learning_rate(optimizer, 1e-2 / (1 + step))
            parameter.grad = gradient.clone()
            optimizer.step()
    return start, parameters, optimizers


def test_moments_of_8_bits_go_nearly_the_way_of_32(without_compiler):
    start, (exact, coarse), _ = train_pair((64, 128), 20)
    way = (exact - start).norm()
    assert 1e-4 * way < (coarse - exact).norm() < 0.02 * way


@pytest.mark.parametrize("shape", [(100,), (40, 40), (65, 65)])
def test_small_tensors_and_those_that_are_no_whole_blocks_keep_32_bits(without_compiler, shape):
    _, (exact, coarse), _ = train_pair(shape, 20)
    torch.testing.assert_close(coarse, exact, rtol=1e-5, atol=1e-6)


def test_moments_of_8_bits_take_a_quarter_of_the_memory(without_compiler):
    _, (parameter, other), (exact, coarse) = train_pair((64, 128), 1)
    moments = [coarse.state[other][name] for name in ("exp_avg", "exp_avg_sq")]
    found = sum(part.nbytes for moment in moments for part in (moment.codes, moment.scale, moment.qmap))
    block, table = 256, 256 * 4
    assert found == 2 * (64 * 128 * (1 + 4 / block) + table)
    assert sum(exact.state[parameter][name].nbytes for name in ("exp_avg", "exp_avg_sq")) == 8 * 64 * 128


def test_without_torchao_8_bits_are_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ValueError, match=r"optimizer.name = 'adamw_8bit' needs torchao .*titan_opd\[float8\]"):
        build_optimizer(nn.Linear(2, 2), OptimizerConfig(name="adamw_8bit"))

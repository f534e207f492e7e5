"""The study of estimators: its statistics, its gradients at fixed prefixes, and the whole script on tiny models."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from estimators.fixed_prefixes import FixedPrefixes
from estimators.gradients import (
    Distributions,
    GradientSketch,
    SampleMoments,
    dense_gradient,
    expected_gradient,
    gradient_of_each_token,
    next_token_logits,
    sampled_gradient,
    topk_gradient,
)
from estimators.report import failed_checks
from estimators.statistics import (
    Estimate,
    jackknife,
    relative_deviation,
    relative_distance,
    squared_norm_of_mean,
    total_variance,
    variance_error,
)
from torch.nn.utils import parameters_to_vector

from tests.helpers.tiny_models import make_tiny_checkpoint
from titan_opd.data import Prompt, Sample, ScoredTrajectory, Trajectory
from titan_opd.data.arithmetic import arithmetic_tokenizer
from titan_opd.data.packing import pack_microbatch
from titan_opd.losses import Objective, TeacherScores
from titan_opd.models import load_decoder

ROOT = Path(__file__).parents[2]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def distributions(num_prefixes: int = 3, vocab_size: int = 4) -> Distributions:
    return Distributions(*(random(num_prefixes, vocab_size, seed=seed).log_softmax(-1) for seed in range(3)))


# Statistics


def test_the_squared_norm_of_a_mean_is_the_mean_product_of_two_draws():
    gradients = random(5, 3)
    products = [first @ second for first, second in itertools.permutations(gradients, 2)]
    torch.testing.assert_close(squared_norm_of_mean(gradients), torch.stack(products).mean())


def test_the_total_variance_is_the_trace_of_the_covariance():
    gradients = random(5, 3)
    torch.testing.assert_close(total_variance(gradients), torch.cov(gradients.T).trace())


def test_the_jackknife_of_a_mean_is_its_textbook_error():
    values = random(9)
    estimate = jackknife(torch.mean, values)
    assert estimate.value == pytest.approx(values.mean().item())
    assert estimate.error == pytest.approx(values.std().item() / 3)


@pytest.mark.parametrize("num_draws", [2, 3, 4])
def test_the_error_of_a_variance_is_exact(num_draws):
    """Against all sequences of draws from three points of unequal weight in the plane: heavy tails included."""
    points = torch.tensor([[0.0, 1.0], [0.5, -1.0], [9.0, 4.0]], dtype=torch.float64)
    weights = torch.tensor([0.6, 0.37, 0.03], dtype=torch.float64)
    centred = points - weights @ points
    covariance = torch.einsum("a,ab,ac->bc", weights, centred, centred)
    square_lengths = centred.square().sum(-1)
    cumulant = weights @ square_lengths**2 - (weights @ square_lengths) ** 2 - 2 * covariance.square().sum()

    chances, variances = [], []
    for sequence in itertools.product(range(3), repeat=num_draws):
        chances.append(weights[list(sequence)].prod())
        variances.append(total_variance(points[list(sequence)]))
    chances, variances = torch.stack(chances), torch.stack(variances)
    mean = chances @ variances
    assert mean.item() == pytest.approx(covariance.trace().item())
    expected = (chances @ (variances - mean).square()).sqrt().item()
    found = variance_error(
        num_draws, covariance_square=float(covariance.square().sum()), fourth_cumulant=float(cumulant)
    )
    assert found == pytest.approx(expected)


def test_relative_distance_and_deviation_of_known_gradients():
    gradients = random(50, 2) * 0.01 + torch.tensor([3.0, 4.0])
    distance = relative_distance(0.3 * gradients, gradients)
    assert distance.value == pytest.approx(0.3)
    assert distance.error < 1e-6
    deviation = relative_deviation(gradients, gradients)
    assert abs(deviation.value - 0.01 * 2**0.5 / 5) < 4 * deviation.error


def test_noise_alone_is_no_distance():
    """The plain length of the mean would be 0.3 here; the estimate is 0 within its error, in most of 40 trials."""
    close = 0
    for seed in range(40):
        noise = random(20, 30, seed=seed)
        estimate = relative_distance(noise, torch.full((20, 30), 4 / 30**0.5, dtype=torch.float64))
        assert estimate.error > 0
        close += estimate.value <= 2 * estimate.error
    assert close >= 36


def test_estimates_are_written_to_two_digits_of_their_error():
    assert str(Estimate(1.23456, 0.0567)) == "1.235 ± 0.057"
    assert str(Estimate(123.4, 56.7)) == "123 ± 57"
    assert str(Estimate(0.5, 0.0)) == "0.5"
    assert str(100 * 0.5) != str(Estimate(0.5, 0.1) * 100) == "50 ± 10"


# Gradients at fixed prefixes


def test_moments_of_samples_are_those_of_all_outcomes():
    """Two prefixes, two samples at each, four tokens: 256 outcomes."""
    num_samples, size = 2, 5
    gradient_ANV, proposal_NV, sketch_BNV = random(4, 2, 3), random(2, 4, seed=1).log_softmax(-1), random(size, 2, 3)
    chances, sketches = [], []
    for tokens in itertools.product(range(4), repeat=2 * num_samples):
        ids_Nm = torch.tensor(tokens).view(2, num_samples)
        chances.append(proposal_NV.gather(1, ids_Nm).sum().exp())
        gradient_NV = torch.stack([gradient_ANV[ids_Nm[row], row].mean(0) for row in range(2)])
        sketches.append(torch.einsum("bnv,nv->b", sketch_BNV, gradient_NV))
    chances, sketches = torch.stack(chances), torch.stack(sketches)
    centred = sketches - chances @ sketches
    covariance = torch.einsum("o,ob,oc->bc", chances, centred, centred)
    square_lengths = centred.square().sum(-1)

    # gradient_ANV has a column less than the vocabulary: the moments need no more than one gradient for each token.
    moments = SampleMoments.of(gradient_ANV, proposal_NV, sketch_BNV).of_mean(num_samples)
    assert moments.variance == pytest.approx(covariance.trace().item())
    assert moments.covariance_square == pytest.approx(covariance.square().sum().item())
    fourth = chances @ square_lengths**2 - (chances @ square_lengths) ** 2 - 2 * covariance.square().sum()
    assert moments.fourth_cumulant == pytest.approx(fourth.item())


@pytest.mark.parametrize(
    ("objective", "dense", "is_unbiased"),
    [
        (Objective("policy_gradient"), "reverse_kl", True),
        (Objective("policy_gradient", correction="none"), "reverse_kl", False),
        (Objective("policy_gradient", correction="ppo_clip"), "reverse_kl", False),
        (Objective("policy_gradient", advantage="rollout"), "reverse_kl", False),
        (Objective("mc_forward_kl"), "forward_kl", True),
    ],
)
def test_of_stale_samples_only_those_with_the_learners_importance_are_unbiased(objective, dense, is_unbiased):
    rows = distributions()
    mean_NV = expected_gradient(gradient_of_each_token(objective, rows), rows.proposal(objective))
    difference = (mean_NV - dense_gradient(dense, rows)).abs().max()
    assert (difference < 1e-12) if is_unbiased else (difference > 1e-3)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_a_support_that_is_the_vocabulary_is_dense(kind):
    rows = distributions()
    torch.testing.assert_close(topk_gradient(Objective(kind), rows, 4), dense_gradient(kind, rows))


def test_redraws_scatter_around_the_expectation():
    rows = distributions()
    objective = Objective("policy_gradient")
    draws = torch.stack([sampled_gradient(objective, rows, 2, seed).flatten() for seed in range(400)])
    expected = expected_gradient(gradient_of_each_token(objective, rows), rows.log_behavior)
    distance = jackknife(squared_norm_of_mean, draws - expected.flatten())
    assert distance.sigmas_from(0) < 4
    assert total_variance(draws) > 0


def test_the_sketch_at_prefixes_is_the_sketch_of_the_parameters_gradient(tmp_path):
    decoder = load_decoder(make_tiny_checkpoint(tmp_path, tie_word_embeddings=True), dtype=torch.float64)
    before = parameters_to_vector(decoder.parameters()).clone()
    trajectories = [
        Trajectory(
            Sample(0, 0, 0, Prompt("a", torch.tensor([5, 6, 7]))), torch.tensor([8, 9, 2]), torch.zeros(3), "stop"
        ),
        Trajectory(Sample(1, 0, 0, Prompt("b", torch.tensor([3]))), torch.tensor([4, 2]), torch.zeros(2), "stop"),
    ]
    batch = pack_microbatch([ScoredTrajectory(trajectory, TeacherScores()) for trajectory in trajectories])
    sketch = GradientSketch(len(before), size=6, seed=0)
    sketch_BNV = sketch.at_prefixes(decoder, batch, vocab_size=20)
    assert torch.equal(parameters_to_vector(decoder.parameters()), before)

    gradient_NV = random(5, 20)
    logits_NV = next_token_logits(decoder, batch, vocab_size=20)
    pieces = torch.autograd.grad(logits_NV, list(decoder.parameters()), gradient_NV)
    found = torch.einsum("bnv,nv->b", sketch_BNV, gradient_NV)
    torch.testing.assert_close(found, sketch(parameters_to_vector(pieces)), rtol=1e-6, atol=1e-6)


def test_a_sketch_keeps_lengths():
    gradient = random(500)
    squares = torch.stack([GradientSketch(500, 50, seed)(gradient).square().sum() for seed in range(200)])
    relative = squares / gradient.square().sum()
    assert abs(relative.mean() - 1) < 4 * relative.std() / 200**0.5
    assert relative.std() == pytest.approx((2 / 50) ** 0.5, rel=0.2)


def test_a_ratio_that_is_not_one_is_told():
    fixed = FixedPrefixes(10, 0.1, 0.1, 0.1)
    fixed.variance_ratio = {("importance", 4, 0): Estimate(1.1, 0.05), ("none", 16, 1): Estimate(16.0, 0.5)}
    assert failed_checks(fixed) == ["none, m = 16, s = 1: 16.00 ± 0.50"]
    assert failed_checks(replace(fixed, variance_ratio={})) == []


# The script

CONFIG = """
[student]
path = ""
[teacher]
[objective]
kind = "forward_kl"
[rollout.sampling]
max_new_tokens = 5
[evaluation.sampling]
max_new_tokens = 5
[data]
task = "arithmetic"
max_prompt_tokens = 16
[schedule]
batch = 4
[training]
steps = 20
[optimizer]
warmup_steps = 1
learning_rate = 1e-3
"""


def run_study(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    for name, seed in (("student", 0), ("teacher", 1)):
        arithmetic_tokenizer().save_pretrained(tmp_path / name)
        make_tiny_checkpoint(tmp_path / name, seed=seed, vocab_size=20, eos_token_id=1)
    (tmp_path / "config.toml").write_text(CONFIG)
    command = [sys.executable, "scripts/study_estimators.py", "--config", tmp_path / "config.toml"]
    command += ["--student", tmp_path / "student", "--teacher", tmp_path / "teacher", "--output", tmp_path / "study"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_script_writes_its_report(tmp_path):
    done = run_study(tmp_path, "--prompts", "2", "--redraws", "4", "--batches", "3", "--sketch", "8")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "study" / "report.md").read_text()
    assert page.strip() == done.stdout.strip()
    assert "nan" not in page
    row = next(
        line for line in page.splitlines() if line.startswith("| samples, importance, learner's advantage | 0 %")
    )
    assert row == "| samples, importance, learner's advantage | 0 % | 0 % | 0 % | 0 % |"
    for plot in ("bias.svg", "variance.svg", "prefix_shift.svg"):
        assert f"]({plot})" in page
        assert ElementTree.parse(tmp_path / "study" / plot).getroot().tag.endswith("svg")


@pytest.mark.slow
def test_settings_that_cannot_be_studied_are_refused(tmp_path):
    done = run_study(tmp_path, "--rollout.sampling.top_p", "0.9")
    assert done.returncode == 2
    assert "top_p = 0.9" in done.stderr
    assert not (tmp_path / "study").exists()

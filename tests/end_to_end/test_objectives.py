"""A short run with each objective: what it writes, that it learns something, that it can be repeated to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from titan_opd.observe import read_metrics

NO_TEACHER = ("--teacher.engine", "none", "--objective.kind", "cross_entropy", "--rollout.engine", "answers")
RUNS = {
    "forward_kl": ("--objective.support", "teacher_topk", "--objective.tail", "bucket"),
    "forward_kl of expert answers": ("--rollout.engine", "answers"),
    "reverse_kl": ("--objective.kind", "reverse_kl", "--rollout.student_top_k", "6"),
    "policy_gradient": ("--objective.kind", "policy_gradient"),
    "policy_gradient, 4 samples": ("--objective.kind", "policy_gradient", "--rollout.num_samples", "4"),
    "policy_gradient, top-p": (
        *("--objective.kind", "policy_gradient", "--objective.correction", "truncated"),
        *("--rollout.sampling.top_p", "0.8", "--rollout.num_samples", "2"),
    ),
    "policy_gradient, M2PO": (
        *("--objective.kind", "policy_gradient", "--objective.correction", "m2po", "--objective.m2_budget", "0.001"),
        *("--schedule.minibatches", "2"),
    ),
    "policy_gradient, decoupled": (
        *("--objective.kind", "policy_gradient", "--objective.correction", "decoupled"),
        *("--schedule.minibatches", "2"),
    ),
    "reverse_kl of expert answers": ("--objective.kind", "reverse_kl", "--rollout.engine", "answers"),
    "mc_forward_kl": ("--objective.kind", "mc_forward_kl", "--teacher.num_samples", "4"),
    "cross_entropy": NO_TEACHER,
    "hybrid": ("--objective.kind", "hybrid", "--rollout.engine", "answers"),
    "hybrid, dense": ("--objective.kind", "hybrid", "--objective.support", "dense", "--rollout.engine", "answers"),
    "jsd, dense": ("--objective.kind", "jsd", "--objective.support", "dense"),
}


def weights(run, step=3):
    return load_file(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("name", RUNS)
def test_a_run(workshop, name):
    directory = name.replace(" ", "-")
    run = workshop.train(directory, *RUNS[name])
    steps = read_metrics(run, "train")
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert all(math.isfinite(value) for key, value in line.items() if key != "kind")
        assert line["tokens"] > 8
        assert line["grad_norm"] > 0
    evaluations = read_metrics(run, "evaluation")
    assert [line["step"] for line in evaluations] == [0, 3]
    assert all(("teacher_kl" in line) == (name != "cross_entropy") for line in evaluations)

    trained = weights(run)
    assert not same(trained, load_file(workshop.folder / "student" / "model.safetensors"))
    assert same(trained, weights(workshop.train(f"{directory}-again", *RUNS[name])))
    assert not same(trained, weights(workshop.train(f"{directory}-other", *RUNS[name], "--run.seed", 1)))


@pytest.mark.parametrize("name", ["policy_gradient, M2PO", "policy_gradient, decoupled"])
def test_a_later_minibatch_is_stale(workshop, name):
    """The second optimizer step on a batch trains a policy that has moved on from the one that wrote."""
    first, *_ = read_metrics(workshop.train(f"stale-{name}".replace(" ", "-"), *RUNS[name]), "train")
    assert first["importance_ratio_max"] > 1.001
    assert first["clipped_share"] > 0


def test_on_policy_samples_have_a_ratio_of_one(workshop):
    """The first step of a synchronous run trains the very policy that wrote, truncated sampling or not."""
    for name in ("policy_gradient", "policy_gradient, 4 samples", "policy_gradient, top-p"):
        first, *_ = read_metrics(workshop.train(f"ratio-{name}".replace(" ", "-"), *RUNS[name]), "train")
        assert first["importance_ratio"] == pytest.approx(1, abs=1e-4)
        assert first["importance_ratio_max"] == pytest.approx(1, abs=1e-3)

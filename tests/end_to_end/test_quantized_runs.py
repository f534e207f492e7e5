"""Whole runs whose answers are written with weights of 8 bits."""

from __future__ import annotations

import shutil

import pytest

from tests.end_to_end.test_worker_schedule import FIXED, WORKERS, asynchronous
from tests.end_to_end.workshop import run_cli
from tests.helpers.runs import assert_same_run
from titan_opd.checkpoint import checkpoint_steps
from titan_opd.observe import read_metrics

OPTIONS = (
    *("--training.steps", 4, "--checkpoint.every", 2, "--weights.verify", "both", "--rollout.quantization", "int8"),
    *FIXED,
)
LINEARS = ", ".join(f"self_attn.{one}_proj" for one in "qkvo") + ", mlp.gate_proj, mlp.up_proj, mlp.down_proj"


@pytest.fixture(scope="module")
def whole(workshop):
    """A run whose engine's bytes and log-probabilities were compared with the trainer's after every step."""
    return workshop.train("quantized", *OPTIONS)


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(workshop, whole):
    run = shutil.copytree(whole, workshop.folder / "quantized-resumed")
    shutil.rmtree(checkpoint_steps(run)[4])
    workshop.train("quantized-resumed", *OPTIONS, "--resume")
    assert_same_run(run, whole)


def test_metrics_tell_what_quantisation_does_to_the_policy(workshop, whole):
    """The gap to the trainer and the mismatch of the written tokens, against those of the same run without it."""
    plain = workshop.train("unquantized", *OPTIONS, "--rollout.quantization", "none")
    for line, without in zip(read_metrics(whole, "train"), read_metrics(plain, "train"), strict=True):
        assert 1e-4 < line["weights/probe_gap"] < 0.5
        assert without["weights/probe_gap"] < 1e-5


def test_a_run_says_at_its_start_which_layers_are_quantised(workshop, capsys):
    workshop.train("quantized-audit", *OPTIONS, "--training.steps", 1, "--rollout.quantization", "fp8")
    printed = " ".join(capsys.readouterr().out.split())
    assert "quantised weights (float8_e4m3fn, a scale for each output row; products in float32): 14 linear" in printed
    assert LINEARS in printed


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_workers_write_what_the_trainers_own_engine_does(workshop, quantization):
    """By shared memory and as what changed: the same quantised bytes, so the same answers and the same training."""
    options = (*OPTIONS, *asynchronous(0), "--rollout.quantization", quantization)
    inside = workshop.train(f"{quantization}-inside", *options)
    beside = workshop.train(
        f"{quantization}-beside", *options, *WORKERS, "--rollout.workers", 1, "--weights.delta", "true"
    )
    weights = "checkpoints/step-000004/model.safetensors"
    assert (beside / weights).read_bytes() == (inside / weights).read_bytes()
    log = next(beside.rglob("rollout-0*.log")).read_text()
    assert LINEARS in log
    assert "14 linear layers" in log


OF_THE_DATA = ("--rollout.engine", "answers", "--objective.kind", "cross_entropy", "--teacher.engine", "none")
OWN = ("--rollout.engine", "vllm", "--rollout.vllm.quantization", "fp8_per_channel")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*OF_THE_DATA, "--rollout.quantization", "int8"), "rollout.quantization = 'int8' makes writing cheaper"),
        ((*OWN, "--rollout.dtype", "float32"), "and rollout.dtype = 'float32'; set it to 'bfloat16'"),
        ((*OWN, "--rollout.quantization", "fp8"), "and rollout.quantization = 'fp8'; set it to 'none'"),
        (OWN[2:], "[rollout.vllm] has no effect with rollout.engine = 'native'"),
    ],
)
def test_what_contradicts_itself_is_refused(workshop, capsys, options, message):
    assert run_cli("train", workshop.toml, *options, "--dry-run") == 2
    assert message in capsys.readouterr().err

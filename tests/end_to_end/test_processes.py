"""The commands as a person starts them: console script, module, torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.runs import load_weights
from titan_opd.observe import read_metrics

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
TORCHRUN = (SCRIPTS / "torchrun", "--standalone", "--nproc-per-node", "2", "-m", "titan_opd.train")
# Shares that need different numbers of micro-batches. (With a small eps AdamW would make steps of full size out of the
# rounding of gradients of 0.)
OPTIONS = ("--training.tokens_per_microbatch", 25, "--optimizer.eps", 1e-3, "--schedule.minibatches", 2)


def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    texts = [str(argument) for argument in arguments]
    return subprocess.run(texts, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.slow
def test_torchrun_trains_as_one_process_does(workshop):
    lone = workshop.train("lone", *OPTIONS)
    run = workshop.folder / "ranks"
    result = run_command(*TORCHRUN, workshop.toml, "--run.directory", run, *OPTIONS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("after 3 steps: ") == 1  # one process talks

    weights, expected = (load_weights(path / "checkpoints/step-000003") for path in (run, lone))
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0)
    assert (run / "journal.jsonl").read_text() == (lone / "journal.jsonl").read_text()
    lines, expected_lines = read_metrics(run), read_metrics(lone)
    for line, expected_line in zip(lines, expected_lines, strict=True):
        assert untimed(line) == pytest.approx(untimed(expected_line), abs=1e-4)


def untimed(line):
    timed = ("time", "seconds/", "tokens_per_second/")
    return {name: value for name, value in line.items() if not name.startswith(timed)}


@pytest.mark.parametrize(
    "command", [[SCRIPTS / "titan-opd"], [sys.executable, "-m", "titan_opd"]], ids=["script", "-m"]
)
def test_a_mistake_is_one_line_and_status_2(workshop, command):
    result = run_command(*command, "train", workshop.toml, "--run.directory", workshop.folder / "no", "--run.sed", 3)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("titan-opd train: error: ")
    assert result.stderr.count("\n") == 1
    assert "did you mean 'seed'?" in result.stderr
    assert not (workshop.folder / "no").exists()


@pytest.mark.slow
def test_a_mistake_ends_all_of_torchruns_processes(workshop):
    result = run_command(*TORCHRUN, workshop.toml, "--run.directory", workshop.folder / "no", "--schedule.batch", 3)
    assert result.returncode != 0
    (line,) = {line for line in result.stderr.splitlines() if line.startswith("titan-opd train: error: ")}
    assert "schedule.batch" in line
    assert "2 processes" in line
    assert not (workshop.folder / "no").exists()

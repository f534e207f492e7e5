"""What a run measures of itself, on a CPU."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from tests.end_to_end.workshop import run_cli
from tests.helpers.processes import start_ranks
from titan_opd.models import DecoderConfig
from titan_opd.models.flops import causal_pairs, training_flops
from titan_opd.observe import read_metrics
from titan_opd.schedule.samples_file import read_samples


@pytest.fixture(scope="module")
def run(workshop):
    """With a profile of its second step, and what each step trained."""
    options = ("--profile.first_step", "2", "--profile.num_steps", "1", "--journal.payload", "true")
    return workshop.train("instruments", *options, "--observe.peak_tflops", "0.001", "--schedule.minibatches", "2")


def check_utilization(workshop, run, *, num_devices):
    """Every step's numbers against the samples that all of its processes have kept."""
    config = DecoderConfig.from_directory(workshop.folder / "student")
    for line in read_metrics(run, "train"):
        paths = (run / "payload").glob(f"step-{line['step']:06}-rank-*.samples")
        trajectories = [one.trajectory for path in paths for one in read_samples(path)]
        assert len(trajectories) == 8
        lengths = [len(one.prompt.token_ids) + len(one.response_ids) - 1 for one in trajectories]
        num_rows = sum(len(one.response_ids) for one in trajectories)
        assert line["tokens"] == num_rows
        flops = training_flops(config, num_tokens=sum(lengths), num_rows=num_rows, num_pairs=causal_pairs(lengths))
        device_seconds = line["seconds/train"] * num_devices
        assert line["mfu"] == pytest.approx(flops / (device_seconds * 1e9))
        assert line["tokens_per_second/train_per_device"] == pytest.approx(sum(lengths) / device_seconds)


def test_mfu_is_that_of_the_samples_which_the_step_trained(workshop, run):
    check_utilization(workshop, run, num_devices=1)


@pytest.mark.slow  # processes that import everything
@pytest.mark.parametrize("layout", [("--parallel.dp_shard", "2"), ("--parallel.tp", "2")])
def test_mfu_and_profiles_of_two_processes(workshop, tmp_path, layout):
    run, log = tmp_path / "run", tmp_path / "log"
    options = ("--observe.peak_tflops", "0.001", "--journal.payload", "true", "--training.steps", "2", *layout)
    profile = ("--profile.first_step", "2", "--profile.num_steps", "1", "--profile.ranks", "[0, 1]")
    processes = start_ranks("train", workshop.toml, "--run.directory", run, *options, *profile, log=log)
    assert [process.wait() for process in processes] == [0, 0], log.read_text()[-3000:]
    check_utilization(workshop, run, num_devices=2)
    names = sorted(path.name for path in (run / "profile").iterdir())
    assert names == ["trainer-0-steps-2-2.json.gz", "trainer-1-steps-2-2.json.gz"]


def test_the_profile_has_the_phases_of_its_step(run):
    (path,) = (run / "profile").iterdir()
    assert path.name == "trainer-0-steps-2-2.json.gz"
    with gzip.open(path, "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    for phase, count in (("rollout", 1), ("score", 1), ("train", 1), ("forward-backward", 2), ("evaluate", 0)):
        assert names.count(phase) == count, phase


def test_without_a_peak_a_cpu_has_no_mfu_and_a_line_says_that_no_gpu_is_counted(workshop, capsys):
    capsys.readouterr()
    path = workshop.train("plain", "--training.steps", "1")
    (line,) = read_metrics(path, "train")
    assert "mfu" not in line
    assert not [name for name in line if name.startswith("gpu/")]
    assert "GPU counters: none, this process computes on the CPU" in capsys.readouterr().out
    assert not (path / "profile").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--observe.gpu_counters", "on"), "observe.gpu_counters = 'on', and there are none"),
        (("--observe.memory_history", "true"), "observe.memory_history = true watches a GPU's allocator"),
        (("--profile.first_step", "1", "--profile.memory", "true"), "profile.memory = true"),
        (("--profile.first_step", "1", "--profile.ranks", "[1]"), "names process 1, and the trainer has 1"),
        (("--profile.first_step", "3"), "end with step 4, and training.steps = 3"),
        (("--profile.num_steps", "3"), "profile.num_steps = 3 has no effect with profile.first_step = 0"),
        (("--profile.first_step", "1", "--profile.ranks", "[]"), "must name at least one process"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(workshop, capsys, options, text):
    path = workshop.folder / "refused"
    assert run_cli("train", workshop.toml, "--run.directory", path, *options) == 2
    assert text in capsys.readouterr().err
    assert not path.exists()


def test_memory_that_runs_out_in_a_step_ends_the_run_with_advice(workshop, capsys, monkeypatch):
    def step(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("titan_opd.learner.Learner.step", step)
    path = workshop.folder / "too large"
    assert run_cli("train", workshop.toml, "--run.directory", path) == 2
    said = capsys.readouterr().err
    assert "in the phase 'train'" in said
    assert "lower training.tokens_per_microbatch" in said

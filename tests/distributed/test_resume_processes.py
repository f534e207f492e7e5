"""Runs of two processes: killed, out of room, resumed, and resumed with another number of processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.end_to_end.workshop import make_workshop
from tests.helpers.processes import start_ranks
from tests.helpers.runs import assert_close_run, assert_same_run, trained_numbers
from titan_opd.checkpoint import checkpoint_steps

pytestmark = pytest.mark.slow  # processes that import everything

OPTIONS = (
    *("--training.steps", 6, "--schedule.minibatches", 2, "--evaluation.every", 4),
    *("--checkpoint.every", 2, "--checkpoint.keep", 3),
    *("--optimizer.eps", 1e-3),  # a small one makes steps of full size out of the rounding of a gradient of 0
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    return make_workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="module")
def lone(workshop):
    """The run of one process."""
    return workshop.train("lone", *OPTIONS)


@pytest.fixture(scope="module")
def pair(workshop):
    """The uninterrupted run of two processes."""
    run = workshop.folder / "pair"
    assert wait(start_pair(workshop, run)) == [0, 0]
    return run


IN_BACKGROUND = ("--checkpoint.asynchronous", "true")
SAVES = pytest.mark.parametrize("options", [(), IN_BACKGROUND], ids=["waited-for", "in-background"])


def start_pair(workshop, run, *faults, log=None, options=()):
    log = log or run.with_suffix(".log")
    arguments = ("train", workshop.toml, "--run.directory", run, *OPTIONS, *options, "--resume")
    return start_ranks(*arguments, log=log, faults=faults or ({}, {}))


def wait(processes):
    return [process.wait() for process in processes]


def copy_until(step, run, copy):
    """A copy of a run that has the checkpoints up to `step` only."""
    shutil.copytree(run, copy)
    for later, path in checkpoint_steps(copy).items():
        if later > step:
            shutil.rmtree(path)
    return copy


def test_the_processes_share_the_samples(lone, pair):
    assert trained_numbers(pair) == list(range(48))
    assert_close_run(pair, lone)


FAULTS = (
    ({"die_at": 12}, {}),
    ({}, {"die_at": 1}),  # before it writes its part of the optimizer's state
    ({"die_at": 40}, {}),
    ({"die_at": 55}, {}),
)


@SAVES
def test_the_death_of_one_ends_the_other_and_the_run_resumes(workshop, pair, tmp_path, options):
    run = tmp_path / "run"
    for faults in FAULTS:
        statuses = wait(start_pair(workshop, run, *faults, options=options))
        killed = 0 if faults[0] else 1
        assert statuses[killed] == -signal.SIGKILL
        assert statuses[1 - killed] > 0
    assert wait(start_pair(workshop, run, options=options)) == [0, 0]
    assert_same_run(run, pair)


@SAVES
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_without_room_fails_the_save_in_both(workshop, pair, tmp_path, rank, options):
    run, log = copy_until(2, pair, tmp_path / "run"), tmp_path / "log"
    faults = [{}, {}]
    checkpoint = run / "checkpoints" / "step-000002"
    too_large = "model-00001-of-00002.safetensors" if rank == 0 else "trainer/__1_0.distcp"
    faults[rank] = {"file_limit": (checkpoint / too_large).stat().st_size - 1}
    assert wait(start_pair(workshop, run, *faults, log=log, options=options)) == [1, 1]
    step_2, step_4 = (run / "checkpoints" / f"step-{step:06d}" for step in (2, 4))
    output = log.read_text()
    assert output.count("titan-opd train: error: ") == 1
    assert f"error: {step_4} could not be written (process {rank}: " in output
    assert "File too large" in output
    assert output.endswith(f"); {step_2} is intact. Make room, then go on with --resume\n")
    assert list((run / "checkpoints").iterdir()) == [step_2]
    assert wait(start_pair(workshop, run)) == [0, 0]
    assert_same_run(run, pair)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_both_ends_both_with_one_line(workshop, pair, tmp_path, number, status):
    run, log = tmp_path / "run", tmp_path / "log"
    processes = start_pair(workshop, run, log=log)
    assert processes[0].wait_until(lambda: (run / "checkpoints" / "step-000002").exists())
    for process in processes:
        process.send(number)
    assert wait(processes) == [status, -number]
    assert log.read_text().count("titan-opd train: interrupted; the same command with --resume goes on") == 1
    assert "Traceback" not in log.read_text()
    assert wait(start_pair(workshop, run)) == [0, 0]
    assert_same_run(run, pair)


def test_a_checkpoint_of_two_processes_resumes_on_one(workshop, pair, tmp_path):
    run = copy_until(2, pair, tmp_path / "run")
    assert workshop.train(run, *OPTIONS, "--resume") == run
    assert_close_run(run, pair)


def test_a_checkpoint_of_one_process_resumes_on_two(workshop, lone, tmp_path):
    run = copy_until(2, lone, tmp_path / "run")
    assert wait(start_pair(workshop, run)) == [0, 0]
    assert_close_run(run, lone)


def test_torchrun_ends_when_the_main_process_alone_fails(workshop, pair, tmp_path):
    """The other process is in the middle of a step when the main one finds that its journal was cut short."""
    run = copy_until(4, pair, tmp_path / "run")
    (run / "journal.jsonl").write_text("")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["-m", "titan_opd.train", workshop.toml, "--run.directory", run, *OPTIONS, "--resume"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [str(part) for part in (*command, *options)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 1
    assert result.stderr.count("journal.jsonl had ") == 1
    assert "bytes when the checkpoint was taken" in result.stderr

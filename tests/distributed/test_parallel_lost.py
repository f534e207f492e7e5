"""A process of the trainer that dies, hangs or gives up in mid-step: the others say which, where and why, in time."""

from __future__ import annotations

import re
import signal

import pytest
import torch.distributed as dist

from tests.end_to_end.workshop import make_workshop
from tests.helpers.processes import start_ranks
from tests.helpers.runs import metrics_without_times
from titan_opd.errors import LostProcessError
from titan_opd.parallel.lost import naming_lost_processes

TIMEOUT = 5


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    return make_workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture
def start(workshop, tmp_path):
    """Two processes in the middle of a long run."""
    processes = []

    def start_run(*options):
        run = tmp_path / "run"
        fixed = ("train", workshop.toml, "--run.directory", run, "--training.steps", 100_000)
        processes.extend(start_ranks(*fixed, *options, log=tmp_path / "log"))
        steps = run / "metrics.jsonl"
        assert processes[0].wait_until(lambda: steps.exists() and len(metrics_without_times(run)) > 3)
        return processes

    yield start_run
    for process in processes:
        process.kill()


LINE = (
    r"titan-opd train: error: process {survivor} waited for others in [a-z_]+ \((\w+/)?\w+\.py:\d+\), and {who} "
    r"\({how}\)"
)


@pytest.mark.slow  # processes that import everything
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_by_the_other(start, tmp_path, victim):
    processes = start()
    processes[victim].kill()
    assert processes[1 - victim].wait(timeout=60) == 1
    who = "process 1 gave no sign of life" if victim else "process 0 is gone, or torchrun, with the store.*"
    assert re.search(LINE.format(survivor=1 - victim, who=who, how="its connection was closed"), last_line(tmp_path))


@pytest.mark.slow
def test_a_process_that_hangs_is_named_within_the_timeout(start, tmp_path):
    processes = start("--parallel.timeout_seconds", TIMEOUT)
    processes[1].send(signal.SIGSTOP)
    assert processes[0].wait(timeout=120) == 1
    how = rf"no answer within parallel\.timeout_seconds = {TIMEOUT}"
    who = "process 1 gave no sign of life"
    assert re.search(LINE.format(survivor=0, who=who, how=how), last_line(tmp_path))


def last_line(folder):
    text = (folder / "log").read_text()
    assert "Traceback" not in text
    return text.splitlines()[-1]


CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


def lose(store, rank, size, error):
    with naming_lost_processes(store, rank, size, 7):
        raise error


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        (
            {1: "ValueError: no room"},
            r"process 1 ended with ValueError: no room and process 2 gave no sign of life",
        ),
        ({2: "lost another process"}, r"and process 1 gave no sign of life \(its connection was closed\)\. The check"),
        ({}, r"and processes 1, 2 gave no sign of life"),
        ({1: "lost another process", 2: "lost another process"}, r"all are there: the network between them failed"),
    ],
)
def test_who_left_no_note_or_one_of_its_own_is_named(notes, message):
    store = dist.HashStore()
    for rank, note in notes.items():
        store.set(f"end of {rank}", note)
    with pytest.raises(LostProcessError, match=rf"process 0 waited for others in .*{message}"):
        lose(store, 0, 3, RuntimeError(CLOSED))


def test_a_process_leaves_its_own_error_to_the_others():
    store = dist.HashStore()
    with pytest.raises(ValueError, match="no room"):
        lose(store, 1, 2, ValueError("no room"))
    with pytest.raises(LostProcessError, match="process 1 ended with ValueError: no room"):
        lose(store, 0, 2, dist.DistBackendError("NCCL communicator was aborted"))

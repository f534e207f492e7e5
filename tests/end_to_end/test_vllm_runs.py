"""Whole runs with vLLM: in the trainer's process, and in workers beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.workshop import TOML, Workshop
from tests.helpers.arithmetic import save_model
from tests.helpers.runs import trained_numbers
from tests.helpers.vllm import needs_vllm
from titan_opd.observe import read_metrics

pytestmark = needs_vllm
VLLM = ("--rollout.engine", "vllm", "--rollout.vllm.kv_cache_mb", "64")
SPLIT = ("--rollout.vllm.tensor_parallel_size", "2")
VLLM_TEACHER = ("--teacher.engine", "vllm", "--teacher.vllm.kv_cache_mb", "64")
WORKERS = ("--rollout.placement", "workers", "--rollout.workers", "1", "--rollout.python", sys.executable)
ASYNC = ("--schedule.mode", "async", "--schedule.max_staleness", "2")
NUM_STEPS = 12


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Models with heads of 32, the smallest of vLLM's attention on a CPU."""
    folder = tmp_path_factory.mktemp("workshop")
    save_model(folder / "student", "llama", seed=0, head_dim=32)
    save_model(folder / "teacher", "qwen3", seed=1, head_dim=32)
    (folder / "run.toml").write_text(TOML.format(folder=folder))
    return Workshop(folder)


def train(workshop: Workshop, name: str, *options: str, num_processes: int = 1) -> Path:
    """A run in processes of its own: vLLM in the trainer's process lasts as long as that."""
    path = workshop.folder / name
    launcher = ["-m", "titan_opd.cli", "train"]
    if num_processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
        launcher += ["-m", "titan_opd.train"]
    command = [sys.executable, *launcher, workshop.toml, "--run.directory", path, *options]
    command += ["--training.steps", str(NUM_STEPS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    return path


def check_run(run: Path) -> None:
    """Every sample once, the student nears its teacher, and each step says how near vLLM is to the trainer."""
    numbers = trained_numbers(run)
    assert len(numbers) == len(set(numbers)) == 8 * NUM_STEPS
    assert max(numbers) < 8 * (NUM_STEPS + 3)
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    losses = [line["loss"] for line in lines]
    assert len(losses) == NUM_STEPS
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    # A step can have a single token of the newest version, in which both engines agree to the bit; not so the first.
    assert all(0 <= line["mismatch/mean"] < 1e-4 for line in lines if "mismatch/mean" in line)
    assert lines[0]["mismatch/mean"] > 0
    assert all(0 < line["weights/probe_floor"] <= line["weights/probe_gap"] < 1e-4 for line in lines)


@pytest.mark.parametrize(
    "options",
    [pytest.param(VLLM, marks=pytest.mark.slow), (*VLLM, *VLLM_TEACHER)],
    ids=["student", "student and teacher"],
)
def test_in_the_trainers_process(workshop: Workshop, options: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    run = train(workshop, request.node.callspec.id.replace(" ", "-"), *options)
    check_run(run)
    assert trained_numbers(run) == list(range(8 * NUM_STEPS))


@pytest.mark.slow
def test_monte_carlo_samples_train_as_the_native_engines_do(workshop: Workshop) -> None:
    """The draws are the same, so the losses are."""
    objective = ("--objective.kind", "policy_gradient", "--objective.support", "sampled", "--rollout.num_samples", "4")
    runs = [train(workshop, "samples", *VLLM, *objective), train(workshop, "samples-native", *objective)]
    mine, native = ([line["loss"] for line in read_metrics(run) if line["kind"] == "train"] for run in runs)
    assert mine == pytest.approx(native, abs=1e-3)
    assert len(set(mine)) == NUM_STEPS


@pytest.mark.slow
def test_in_each_of_two_trainer_processes(workshop: Workshop) -> None:
    run = train(workshop, "two-processes", *VLLM, num_processes=2)
    check_run(run)
    assert trained_numbers(run) == list(range(8 * NUM_STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), ("--parallel.tp", "2")], ids=["fsdp", "tp"])
def test_one_engine_in_two_trainer_processes(workshop: Workshop, layout: tuple[str, ...]) -> None:
    run = train(workshop, f"split-{len(layout)}", *VLLM, *SPLIT, *layout, num_processes=2)
    check_run(run)
    assert trained_numbers(run) == list(range(8 * NUM_STEPS))


def test_in_workers_while_the_trainer_trains(workshop: Workshop) -> None:
    run = train(workshop, "asynchronous", *VLLM, *WORKERS, *ASYNC)
    check_run(run)
    stale = [line["staleness/max"] for line in read_metrics(run) if "staleness/max" in line]
    assert all(value <= 2 for value in stale)


@pytest.mark.slow
def test_in_a_thread_of_the_trainer_with_a_vllm_beside_it(workshop: Workshop) -> None:
    check_run(train(workshop, "overlapping", *VLLM, *ASYNC))


@pytest.mark.slow
def test_all_roles_in_workers(workshop: Workshop) -> None:
    teachers = ("--teacher.placement", "workers", "--teacher.workers", "1", "--teacher.python", sys.executable)
    check_run(train(workshop, "all-workers", *VLLM, *VLLM_TEACHER, *WORKERS, *teachers, *ASYNC))


@pytest.mark.slow
def test_a_killed_vllm_is_started_anew(workshop: Workshop, tmp_path: Path) -> None:
    """Its worker ends with the reason, the supervisor starts another, and no sample is lost or trained twice."""
    run = workshop.folder / "killed"
    options = (*VLLM, *WORKERS, *ASYNC, "--training.steps", NUM_STEPS, "--run.directory", run)
    command = [sys.executable, "-m", "titan_opd.cli", "train", workshop.toml, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "output").open("w+") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, env=environment)
        try:
            while process.poll() is None and not ((run / "journal.jsonl").exists() and trained_numbers(run)):
                time.sleep(0.05)
            (vllm,) = [one for one in descendants(process.pid) if name_of(one).startswith("VLLM::EngineCore")]
            os.kill(vllm, signal.SIGKILL)
            status = process.wait(600)
        finally:
            process.kill()
        output.seek(0)
        assert status == 0, output.read()[-4000:]
    check_run(run)


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, and they."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *descendants(child)]
    return found


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def test_an_interpreter_that_is_not_there(workshop: Workshop) -> None:
    command = [sys.executable, "-m", "titan_opd.cli", "train", workshop.toml, *VLLM, *WORKERS[:-1], "/no/python"]
    command += ["--run.directory", workshop.folder / "nowhere"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "rollout.python = '/no/python'" in done.stderr

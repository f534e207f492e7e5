"""Schedules with workers: in one process, in several, killed anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.end_to_end.workshop import run_cli
from tests.helpers.processes import CommandProcess, start_ranks
from tests.helpers.runs import assert_close_run, assert_same_run, metrics_without_times, trained_numbers
from titan_opd.channel import generate_keys
from titan_opd.observe import read_metrics
from titan_opd.observe.lines import read_lines

STEPS, BATCH = 6, 8
OPTIONS = (
    *("--training.steps", STEPS, "--schedule.batch", BATCH, "--schedule.samples_per_prompt", 2),
    *("--data.arithmetic.num_train", 20, "--rollout.max_concurrent", 3),  # an epoch is 40 samples
)
FIXED = ("--rollout.fixed_shapes", "true", "--teacher.fixed_shapes", "true")
WORKERS = (
    *("--rollout.placement", "workers", "--rollout.workers", 2),
    *("--teacher.placement", "workers", "--teacher.workers", 1),
    *("--channel.heartbeat_seconds", 0.5, "--channel.silence_seconds", 5),
)


def asynchronous(max_staleness: int, *options: object) -> tuple[object, ...]:
    return ("--schedule.mode", "async", "--schedule.max_staleness", max_staleness, *options)


def assert_every_sample_once(run: Path, steps: int = STEPS) -> None:
    """Each step trained a batch, and no sample was skipped by more than the bound or trained twice."""
    numbers = trained_numbers(run)
    assert len(numbers) == len(set(numbers)) == steps * BATCH
    assert [line["step"] for line in read_lines(run / "journal.jsonl")] == list(range(1, steps + 1))


def staleness(run: Path) -> list[float]:
    return [line["staleness/max"] for line in read_metrics(run, "train")]


@pytest.fixture(scope="module")
def synchronous(workshop):
    return workshop.train("synchronous", *OPTIONS, *FIXED)


@pytest.mark.parametrize("mode", ["async", "step_off"])
def test_without_staleness_it_is_the_synchronous_schedule_bit_by_bit(workshop, synchronous, mode):
    run = workshop.train(mode, *OPTIONS, *FIXED, "--schedule.mode", mode, "--schedule.max_staleness", 0)
    assert (run / "journal.jsonl").read_bytes() == (synchronous / "journal.jsonl").read_bytes()
    weights = f"checkpoints/step-{STEPS:06d}/model.safetensors"
    assert (run / weights).read_bytes() == (synchronous / weights).read_bytes()
    assert staleness(run) == [0.0] * STEPS


@pytest.mark.parametrize("mode", ["async", "step_off"])
@pytest.mark.parametrize("in_flight", ["keep", "wait"])
def test_tokens_are_at_most_so_stale_and_some_are(workshop, mode, in_flight):
    run = workshop.train(
        f"{mode}-{in_flight}",
        *OPTIONS,
        *("--schedule.mode", mode, "--schedule.max_staleness", 2, "--schedule.in_flight", in_flight),
    )
    assert_every_sample_once(run)
    assert max(staleness(run)) <= 2
    assert max(staleness(run)) > 0
    if mode == "step_off":
        assert trained_numbers(run) == list(range(STEPS * BATCH))


@pytest.mark.parametrize(
    "options",
    [
        ("--schedule.on_limit", "mask"),
        ("--schedule.on_limit", "drop"),
        ("--schedule.in_flight", "restart"),
        ("--schedule.recompute_kv", "false"),
        ("--objective.kind", "policy_gradient", "--rollout.num_samples", 3, "--schedule.minibatches", 2),
        ("--objective.kind", "policy_gradient", "--objective.correction", "decoupled", "--objective.cap", 5.0),
        ("--objective.kind", "reverse_kl", "--objective.support", "student_topk", "--rollout.student_top_k", 4),
        ("--objective.kind", "jsd", "--objective.support", "dense"),
    ],
)
def test_settings_that_run_through_workers(workshop, options):
    name = "-".join(str(option).rpartition(".")[2] for option in options)
    run = workshop.train(name, *OPTIONS, *asynchronous(1), *options)
    numbers = trained_numbers(run)
    assert len(numbers) == len(set(numbers)) == STEPS * BATCH
    assert max(staleness(run)) <= 1


def test_replay_gives_the_same_weights(workshop):
    run = workshop.train("recorded", *OPTIONS, *asynchronous(2), "--journal.payload", "true")
    again = workshop.folder / "replayed"
    journal = ("--replay", run / "journal.jsonl")
    assert run_cli("train", workshop.toml, "--run.directory", again, *OPTIONS, *asynchronous(2), *journal) == 0
    weights = f"checkpoints/step-{STEPS:06d}/model.safetensors"
    assert (again / weights).read_bytes() == (run / weights).read_bytes()
    assert trained_numbers(again) == trained_numbers(run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--replay", "nowhere/journal.jsonl"), "--replay nowhere/journal.jsonl is no file"),
        (("--rollout.workers", 1), "rollout.workers = 1 starts processes that rollout.placement = 'colocated'"),
        (("--schedule.max_staleness", 2), "schedule.max_staleness = 2 needs mode = 'step_off' or 'async'"),
        (("--channel.address", "tcp://0.0.0.0:5555", *WORKERS), "needs CURVE keys"),
        (("--rollout.cores", '["x"]', "--rollout.placement", "workers", "--rollout.workers", 1), "no list of cores"),
    ],
)
def test_what_cannot_be_is_refused(workshop, tmp_path, capsys, options, message):
    assert run_cli("train", workshop.toml, "--run.directory", tmp_path / "run", *OPTIONS, *options) == 2
    assert message in capsys.readouterr().err


# ---- Killed and resumed ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_trainer_resumes_with_every_sample_once(workshop, tmp_path):
    run = tmp_path / "run"
    options = (*OPTIONS, *asynchronous(2), "--training.steps", 12, "--checkpoint.every", 2)
    random_times = random.Random(1)
    for _ in range(5):
        process = start(workshop, run, options)
        time.sleep(random_times.uniform(0.6, 1.5))
        process.kill()
    process = start(workshop, run, options)
    assert process.wait() == 0, process.log.read_text()
    assert_every_sample_once(run, steps=12)
    assert max(staleness(run)) <= 2


@pytest.mark.slow
def test_a_resumed_run_without_staleness_equals_the_whole_one(workshop, tmp_path):
    options = (*OPTIONS, *FIXED, *asynchronous(0), "--checkpoint.every", 2, "--checkpoint.keep", 9)
    whole = workshop.train("whole-async", *options)
    run = tmp_path / "run"
    for _ in range(3):
        process = start(workshop, run, options)
        time.sleep(0.9)
        process.kill()
    process = start(workshop, run, options)
    assert process.wait() == 0, process.log.read_text()
    assert_same_run(run, whole)


@pytest.mark.slow
def test_workers_killed_again_and_again_lose_nothing(workshop, tmp_path):
    run = tmp_path / "run"
    steps = 60
    process = start(workshop, run, (*OPTIONS, *asynchronous(2), *WORKERS, "--training.steps", steps))
    random_choices = random.Random(2)
    kills = 0
    assert process.wait_until(lambda: (run / "journal.jsonl").exists() and trained_numbers(run)), (
        process.log.read_text()
    )
    while process.running and kills < 6:
        victims = [pid for name in ("rollout-0", "rollout-1", "teacher-0") for pid in worker_processes(run, name)]
        if victims:
            with contextlib.suppress(ProcessLookupError):  # it has just ended with the run
                os.kill(random_choices.choice(victims), signal.SIGKILL)
                kills += 1
        time.sleep(random_choices.uniform(0.5, 2.0))
    assert process.wait() == 0, process.log.read_text()
    assert kills > 0
    assert_every_sample_once(run, steps)
    assert max(staleness(run)) <= 2
    assert not any(worker_processes(run, name) for name in ("conductor", "rollout-0", "rollout-1", "teacher-0"))


@pytest.mark.slow
def test_a_killed_trainer_leaves_no_process_behind_and_resumes(workshop, tmp_path):
    run = tmp_path / "run"
    options = (*OPTIONS, *asynchronous(1), *WORKERS, "--training.steps", 20, "--checkpoint.every", 4)
    process = start(workshop, run, options)
    assert process.wait_until(lambda: (run / "checkpoints" / "step-000004").exists()), process.log.read_text()
    process.kill()
    process = start(workshop, run, options)
    assert process.wait() == 0, process.log.read_text()
    assert_every_sample_once(run, steps=20)
    assert not worker_processes(run, "")


@pytest.mark.slow
def test_a_worker_of_another_model_is_refused_with_the_reason(workshop, tmp_path):
    """The conductor takes nobody whose prompts, vocabulary or model are others."""
    run = tmp_path / "run"
    options = (
        *OPTIONS,
        *asynchronous(1),
        "--channel.address",
        f"ipc://{tmp_path}/c/conductor",
        "--training.steps",
        500,
    )
    process = start(workshop, run, options)
    assert process.wait_until(lambda: (run / "journal.jsonl").exists() and trained_numbers(run)), (
        process.log.read_text()
    )
    stranger = CommandProcess(
        *("worker", run / "config.toml", "--role", "rollout", "--name", "stranger"),
        *("--data.arithmetic.seed", 5),
        log=tmp_path / "stranger.log",
    )
    assert stranger.wait() == 2
    assert "prompts" in stranger.log.read_text()
    wrong_teacher = CommandProcess(
        *("worker", run / "config.toml", "--role", "teacher", "--name", "wrong"),
        *("--teacher.path", workshop.folder / "student"),
        log=tmp_path / "wrong.log",
    )
    assert wrong_teacher.wait() == 2
    assert "model" in wrong_teacher.log.read_text()
    assert process.running
    process.send(signal.SIGINT)
    process.wait()


def has_trained(run: Path) -> bool:
    return (run / "journal.jsonl").exists() and len(trained_numbers(run)) > 0


def start(workshop, run: Path, options: tuple[object, ...]) -> CommandProcess:
    log = run.with_suffix(".log")
    return CommandProcess("train", workshop.toml, "--run.directory", run, "--resume", *options, log=log)


def worker_processes(run: Path, name: str) -> list[int]:
    """The worker processes of a run, by what stands on their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            if f"{run}/config.toml" in words and "worker" in words and (not name or name in words):
                found.append(int(folder.name))
    return found


def test_metrics_of_a_schedule_with_workers(workshop):
    run = workshop.train("measured", *OPTIONS, *asynchronous(1))
    last = [line for line in metrics_without_times(run) if line["kind"] == "train"][-1]
    assert last["staleness/share_0"] + last["staleness/share_1"] == pytest.approx(1)


@pytest.mark.slow
def test_weights_that_come_as_what_changed_train_what_whole_ones_do(workshop):
    options = (*OPTIONS, *FIXED, *asynchronous(0), "--rollout.dtype", "bfloat16", "--optimizer.learning_rate", 1e-5)
    whole = workshop.train("whole-tensors", *options)
    changes = ("--weights.transport", "channel", "--weights.delta", "true")
    run = workshop.train("what-changed", *options, *WORKERS, "--rollout.workers", 1, *changes)
    weights = f"checkpoints/step-{STEPS:06d}/model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()
    assert (run / "journal.jsonl").read_bytes() == (whole / "journal.jsonl").read_bytes()
    for line in read_metrics(run, "train"):
        assert 0 < line["weights/changed_share"] < line["weights/delta_share"] < 0.5
    log = next(run.rglob("rollout-0*.log")).read_text()
    assert "weights come by channel, what changed: version 1 in" in log


# ---- Several machines, many processes --------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_trainer_processes_train_what_one_does(workshop, tmp_path):
    options = (*OPTIONS, *FIXED, *asynchronous(0))
    whole = workshop.train("one-process", *options)
    run = tmp_path / "run"
    arguments = ("train", workshop.toml, "--run.directory", run, *options, *WORKERS)
    processes = start_ranks(*arguments, log=tmp_path / "run.log")
    assert [process.wait() for process in processes] == [0, 0], (tmp_path / "run.log").read_text()
    assert_close_run(run, whole)


@pytest.mark.slow
def test_two_trainer_processes_with_engines_in_them(workshop, tmp_path):
    run = tmp_path / "run"
    arguments = ("train", workshop.toml, "--run.directory", run, *OPTIONS, *asynchronous(1))
    processes = start_ranks(*arguments, log=tmp_path / "run.log")
    assert [process.wait() for process in processes] == [0, 0], (tmp_path / "run.log").read_text()
    assert_every_sample_once(run)


@pytest.mark.slow
def test_workers_join_over_tcp_with_keys_and_nobody_without(workshop, tmp_path):
    keys = tmp_path / "keys"
    generate_keys(keys, ["conductor", "worker"])
    port = free_port()
    run = tmp_path / "run"
    secured = ("--channel.address", f"tcp://127.0.0.1:{port}", "--channel.keys", keys)
    options = (*OPTIONS, *asynchronous(1), "--training.steps", 12, "--rollout.placement", "workers")
    process = start(workshop, run, (*options, *secured))
    assert process.wait_until((run / "config.toml").exists), process.log.read_text()
    worker = ("worker", run / "config.toml", "--role", "rollout")
    stranger = CommandProcess(*worker, "--name", "stranger", "--channel.keys", "", log=tmp_path / "stranger.log")
    assert stranger.wait() != 0
    assert not trained_numbers(run) if (run / "journal.jsonl").exists() else True
    member = CommandProcess(*worker, "--name", "member", log=tmp_path / "member.log")
    assert process.wait() == 0, process.log.read_text() + (tmp_path / "member.log").read_text()
    assert member.wait() == 0, (tmp_path / "member.log").read_text()
    assert_every_sample_once(run, steps=12)


@pytest.mark.slow
def test_a_run_without_workers_says_who_is_missing(workshop, tmp_path):
    run = tmp_path / "run"
    options = (*OPTIONS, *asynchronous(1), "--rollout.placement", "workers", "--observe.stall_seconds", 6)
    process = start(workshop, run, options)
    assert process.wait() == 1, process.log.read_text()
    report = (run / "watchdog.txt").read_text()
    assert "rollout" in report
    assert "no worker" in report or "never" in report or "missing" in report, report
    assert "Traceback" not in process.log.read_text()


@pytest.mark.slow
def test_a_taken_address_is_named(workshop, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        options = (*OPTIONS, *asynchronous(1), "--channel.address", address)
        process = start(workshop, tmp_path / "run", options)
        assert process.wait() in (1, 2)
    assert f"{address} is taken" in process.log.read_text()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_small_store_holds_answers_back_and_loses_none(workshop):
    """Room for one answer or two at a time: workers wait for the trainer, and everything is in the trace."""
    run = workshop.train(
        "small-store",
        *(*OPTIONS, *asynchronous(1), "--channel.store_mb", 0.02, "--weights.timeout_seconds", 60),
        *("--observe.trace", "true", "--observe.trace_mb", 1),
    )
    assert_every_sample_once(run)
    names = {event["name"] for event in json.loads((run / "trace.json").read_text())["traceEvents"]}
    assert {"rollout", "score", "forward-backward", "optimizer", "weight update", "wait", "queue", "staleness"} <= names

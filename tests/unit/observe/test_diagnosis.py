"""What a watchdog's report points to; states are those of the real conductor where it can be brought into them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.data.make import make_prompt
from titan_opd.data import PromptStream
from titan_opd.observe.diagnosis import FULL_DISK_BYTES, LeaseState, RunState, StallReport, WorkerState, diagnose
from titan_opd.observe.stall_text import report_text
from titan_opd.schedule import AnswerHeader, Batch, Conductor, ScheduleRules

LEASE_SECONDS = 60.0
PLENTY = 1 << 40


@pytest.fixture
def conductor():
    prompts = [make_prompt(f"p{i}", [i]) for i in range(4)]
    stream = PromptStream(prompts, shuffle=False, seed=0, samples_per_prompt=1)
    return Conductor(ScheduleRules(2, 1, "async"), stream, lease_seconds=LEASE_SECONDS, incarnation="0")


def causes(conductor, now):
    """What is said of the conductor's state after a way over the wire."""
    report = json.loads(json.dumps(conductor.report(now).as_dict()))
    state = RunState.from_schedule(report, max_staleness=1, lease_seconds=LEASE_SECONDS)
    report = StallReport(Path("runs/a"), 300.0, {"step": 300.0}, PLENTY, state)
    text = " ".join(report_text(report).split())  # whatever the state, it can be shown
    assert " ".join(f"1. {diagnose(report)[0]}".split()) in text
    return diagnose(report)


def write_answers(conductor, count, now=0.0):
    for lease in conductor.lease_rollout("engine", count, now):
        header = AnswerHeader(lease.version, lease.version, 5, "somewhere")
        assert conductor.rollout_done("engine", lease.id, header, now)


def score_answers(conductor, now=0.0):
    for lease in conductor.lease_scoring("teacher", 100, now):
        assert conductor.scoring_done("teacher", lease.id, "somewhere", now)


def with_engine(conductor, now=0.0):
    conductor.register("engine", "rollout", now)
    conductor.engine_at("engine", conductor.version)


def with_teacher(conductor, now=0.0):
    conductor.register("teacher", "teacher", now)


def test_a_worker_that_never_dialled_in(conductor):
    with_teacher(conductor)
    assert causes(conductor, 1.0)[0].startswith("no rollout worker is there: none has dialled in")


def test_a_teacher_route_without_a_worker(conductor):
    with_engine(conductor)
    write_answers(conductor, 2)
    assert "no teacher worker for teacher route 'default' is there" in causes(conductor, 1.0)[0]


def test_an_expired_lease(conductor):
    with_engine(conductor)
    with_teacher(conductor)
    conductor.lease_rollout("engine", 2, 0.0)
    conductor.heartbeat("teacher", 200.0)
    first, *others = causes(conductor, 200.0)
    assert first.startswith("rollout worker engine has been silent for 200 s, so its leases have expired")
    assert "on samples 0, 1" in first
    assert not any("slow consumer" in cause for cause in others)  # it is dead, not slow


def test_an_engine_at_an_old_version(conductor):
    with_engine(conductor)
    with_teacher(conductor)
    for _ in range(2):  # the trainer goes on as far as the bound lets it, the engine gets no update
        write_answers(conductor, 2)
        score_answers(conductor)
        assert isinstance(conductor.next_batch(conductor.version, 0.0), Batch)
        conductor.batch_trained(conductor.version)
    (cause,) = causes(conductor, 1.0)
    assert cause.startswith("the engine of engine is at the old policy version 0, the trainer at 2")


def test_an_engine_whose_update_broke_off(conductor):
    with_engine(conductor)
    with_teacher(conductor)
    conductor.engine_failed("engine")
    (cause,) = causes(conductor, 1.0)
    assert "holds no complete version (the trainer is at 0): an update broke off" in cause


def test_a_trainer_that_does_not_finish_its_step(conductor):
    with_engine(conductor)
    with_teacher(conductor)
    write_answers(conductor, 4)
    score_answers(conductor)
    conductor.next_batch(0, 0.0)
    (cause,) = causes(conductor, 1.0)
    assert cause.startswith("the trainer is the slow consumer: it has the batch of version 0 and does not finish")
    assert "(2 more samples are scored and wait)" in cause


def test_a_trainer_that_does_not_take_its_batch(conductor):
    with_engine(conductor)
    with_teacher(conductor)
    write_answers(conductor, 4)
    score_answers(conductor)
    (cause,) = causes(conductor, 1.0)
    assert "the trainer is the slow consumer: a batch of version 0 is ready" in cause


def test_a_slow_teacher(conductor):
    with_engine(conductor)
    with_teacher(conductor)
    write_answers(conductor, 4)
    conductor.lease_scoring("teacher", 2, 0.0)
    conductor.heartbeat("teacher", 50.0)
    (cause,) = causes(conductor, 50.0)
    assert cause.startswith(
        "teacher worker teacher is the slow consumer: the step at version 0 waits for samples to be"
    )
    assert "it has been scoring sample 0 for 50 s (2 such samples, 2 more answers wait)" in cause


def test_a_slow_engine(conductor):
    with_engine(conductor)
    with_teacher(conductor)
    conductor.lease_rollout("engine", 3, 0.0)
    conductor.heartbeat("engine", 55.0)
    conductor.heartbeat("teacher", 55.0)
    (cause,) = causes(conductor, 55.0)
    assert "rollout worker engine is the slow consumer" in cause
    assert "it has been writing sample 0 for 55 s (3 such samples)" in cause


def test_an_answer_that_holds_a_step_back_by_its_deadline():
    engine = WorkerState("e", "rollout", 4, 1.0, (LeaseState(20, 500.0), LeaseState(17, 400.0)))
    state = RunState(4, 1, LEASE_SECONDS, False, "rollout", "deadline", (17,), {"scored": 9}, (), (engine,))
    (cause,) = diagnose(StallReport(Path("a"), 300.0, {}, PLENTY, state))
    assert "(deadlines allow no other batch), and it has been writing sample 17 for 400 s (1 such samples)" in cause


def test_a_worker_that_does_not_ask_for_work(conductor):
    with_engine(conductor)
    with_teacher(conductor)
    assert causes(conductor, 1.0) == [
        "rollout worker engine has work and sends signs of life, but does not ask for it: its main loop hangs"
    ]


def test_a_full_disk_comes_before_anything_else(conductor):
    report = StallReport(Path("runs/a"), 300.0, {}, FULL_DISK_BYTES - 1)
    assert diagnose(report) == ["the disk of runs/a is full (63 MiB free): make room, then go on with --resume"]
    state = RunState(0, 1, LEASE_SECONDS, True)
    assert diagnose(replace(report, state=state))[0].startswith("the disk of runs/a is full")
    assert "full" not in diagnose(replace(report, free_bytes=FULL_DISK_BYTES))[0]


def test_a_disk_that_hangs():
    assert "the disk of runs/a does not answer" in diagnose(StallReport(Path("runs/a"), 300.0))[0]


def test_a_conductor_that_does_not_answer():
    report = StallReport(Path("runs/a"), 300.0, {}, PLENTY, None, "no answer within 10 s")
    assert diagnose(report)[0].startswith(
        "the conductor does not tell the state of the schedule (no answer within 10 s)"
    )


def test_without_any_sign_it_says_so():
    assert diagnose(StallReport(Path("runs/a"), 300.0, {}, PLENTY)) == [
        "no cause is recognised; the stacks below tell where each thread stands"
    ]


def test_names_from_outside_are_shown_as_they_are():
    worker = WorkerState("[red]odd[/nothing]", "rollout", 0, 1.0, tuple(LeaseState(n, 2.0) for n in range(11)))
    state = RunState(0, 1, LEASE_SECONDS, False, "rollout", "samples", (), {"scored": 0}, ("teacher:[b]",), (worker,))
    text = report_text(StallReport(Path("[runs]"), 300.0, {"step [1]": 3.0}, PLENTY, state))
    for part in ("[red]odd[/nothing]", "teacher:[b]", "[runs]", "step [1]", "and 3 more"):
        assert part in text

"""The watchdog, on real processes that hang in real ways."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.unit.observe import children
from titan_opd.errors import StallError
from titan_opd.observe import Watchdog, merge_trace, offer_stacks, request_stacks

LONGEST = 60  # seconds until a test gives up; the watchdog's own limits are below 3


def nothing_to_tell():
    return None


def run_until_it_ends(folder, how):
    """Exit status and output of a run that stalls."""
    log = folder / "log.txt"
    process = children.start(children.stall, folder, log, how)
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        pytest.fail(f"the watchdog did not end it; it said:\n{log.read_text()}")
    return process.exitcode, log.read_text()


def test_a_waiting_main_thread_gets_the_error(tmp_path):
    ready = children.context.Event()
    other = children.start(children.offer_and_sleep, tmp_path, ready)
    try:
        assert ready.wait(LONGEST)
        status, output = run_until_it_ends(tmp_path, "sleep")
    finally:
        other.kill()
        other.join()
    assert status == 7  # of its own accord, after cleaning up
    error = (tmp_path / "error.txt").read_text()
    assert error.startswith("nothing has moved for ")
    assert "Most likely: no rollout worker is there" in error
    report = (tmp_path / "watchdog.txt").read_text()
    for part in ("Most likely causes", "trainer step", "waits for rollout", "missing"):
        assert part in output
        assert part in report
    assert "Stacks of this process" not in output  # stacks are for the file
    own, others = report.split("Stacks of this process")[1].split(f"Stacks of teacher-4-{other.pid}")
    assert "in stall" in own
    assert "in a_place_that_the_stacks_name" in others
    said = []
    merge_trace(tmp_path, say=said.append)
    assert len(said) == 1  # the trace ended in good order


@pytest.mark.parametrize("how", ["swallow", "lock in C"])
def test_a_main_thread_that_does_not_react_is_ended_with_its_process(tmp_path, how):
    status, output = run_until_it_ends(tmp_path, how)
    assert status == 1
    assert not (tmp_path / "error.txt").exists()
    for text in (output, (tmp_path / "watchdog.txt").read_text()):
        assert "no rollout worker is there" in text
        assert "the main thread has not reacted for 0.5 s; the process ends" in text
    assert "_swallow_the_error" in (tmp_path / "watchdog.txt").read_text() or how != "swallow"


def test_a_process_whose_interpreter_is_held_is_ended(tmp_path):
    status, _ = run_until_it_ends(tmp_path, "interpreter held")
    assert status == 1
    report = (tmp_path / "watchdog.txt").read_text()
    assert "Timeout" in report
    assert "_lock_twice" in report


@pytest.mark.slow  # it sleeps
def test_progress_and_pauses_keep_it_quiet(tmp_path):
    with Watchdog(tmp_path, 2.0, collect=nothing_to_tell) as watchdog:
        done = threading.Event()

        def report_progress():
            while not done.wait(0.05):
                watchdog.progress("answer written")

        thread = threading.Thread(target=report_progress)
        thread.start()
        time.sleep(3.0)
        with watchdog.paused("evaluation"):
            done.set()
            thread.join()
            with watchdog.paused("checkpoint"):
                pass
            time.sleep(3.0)
    assert not (tmp_path / "watchdog.txt").exists()
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_a_pause_that_outlives_the_watchdog_ends_nothing(tmp_path):
    process = children.start(children.outlive_the_watchdog, tmp_path)
    process.join(LONGEST)
    assert process.exitcode == 7
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_fails_or_hangs_does_not_keep_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("titan_opd.observe.watchdog.STEP_SECONDS", 0.3)

    def hang():
        time.sleep(LONGEST)

    def fail():
        raise ConnectionError("nobody listens")

    for collect, reason in ((hang, "no answer within 0.3 s"), (fail, "nobody listens")):
        with (
            pytest.raises(StallError, match=f"does not tell the state of the schedule .{reason}"),
            Watchdog(tmp_path, 0.2, collect=collect, grace_seconds=LONGEST),
        ):
            time.sleep(LONGEST)


def test_an_error_of_the_run_is_its_own(tmp_path):
    with pytest.raises(KeyError, match="mine"), Watchdog(tmp_path, LONGEST, collect=nothing_to_tell):
        raise KeyError("mine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["stall_seconds", "grace_seconds"])
def test_times_must_be_positive(tmp_path, name):
    times = {"stall_seconds": 1.0, "grace_seconds": 1.0, name: 0.0}
    with pytest.raises(ValueError, match=f"{name} = 0"):
        Watchdog(tmp_path, collect=nothing_to_tell, **times)


# Stacks of other processes


def test_the_stacks_of_another_process_are_told(tmp_path):
    ready = children.context.Event()
    process = children.start(children.offer_and_sleep, tmp_path, ready)
    try:
        assert ready.wait(LONGEST)
        for _ in range(2):  # the second answer does not repeat the first
            (name, stacks) = next(iter(request_stacks(tmp_path, seconds=LONGEST).items()))
            assert name == f"teacher-4-{process.pid}"
            assert stacks.count("in a_place_that_the_stacks_name") == 1
        assert process.is_alive()
        os.kill(process.pid, signal.SIGSTOP)
        assert request_stacks(tmp_path, seconds=0.2) == {name: "did not answer within 0.2 s\n"}
    finally:
        process.kill()
        process.join()
    assert request_stacks(tmp_path, seconds=0.2) == {}  # the file of a dead process asks nobody


def test_a_process_that_no_longer_answers_is_not_killed_by_the_question(tmp_path):
    ready = children.context.Event()
    process = children.start(children.offer_and_sleep, tmp_path, ready)
    bystander = children.start(time.sleep, LONGEST)
    try:
        assert ready.wait(LONGEST)
        path = tmp_path / "stacks" / f"teacher-4-{process.pid}.txt"
        stolen = path.read_text().replace(str(process.pid), str(bystander.pid))
        process.kill()
        path.write_text(stolen)  # as if the number had gone to another process
        path.with_name("half.txt").write_text('{"pid": 1')
        assert request_stacks(tmp_path, seconds=0.2) == {}
        assert bystander.is_alive()
    finally:
        for child in (process, bystander):
            child.kill()
            child.join()


def test_an_offer_that_nobody_took_leaves_no_file(tmp_path):
    with offer_stacks(tmp_path, "trainer", 0) as path:
        assert path.exists()
        assert request_stacks(tmp_path) == {}  # its own are known already
    assert not path.exists()

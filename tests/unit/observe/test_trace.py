"""Traces: one process's events on disk, whatever happens to it, and all processes' in one file."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.observe import children
from tests.unit.observe.trace_format import check_trace, notices, process_names
from titan_opd.observe import ClockOffset, ClockSample, PhaseClock, Tracer, machine_id, merge_trace, trace
from titan_opd.observe.trace_file import (
    BUFFER_BYTES,
    BeginLine,
    ClockLine,
    CloseLine,
    CounterLine,
    EndLine,
    EventsFile,
    InstantLine,
    ProcessLine,
    decode_line,
)


def merged(folder):
    """The events of the merged file but for names, after a check of the whole file."""
    return [event for event in check_trace(merge_trace(folder, say=lambda _: None)) if event["ph"] != "M"]


def read(path):
    """The lines of an events file, and whether half a line follows."""
    *complete, rest = path.read_bytes().split(b"\n")
    return [decode_line(line) for line in complete], rest != b""


def write(folder, name, *lines):
    """An events file of another machine, or of another time."""
    (folder / "trace").mkdir(exist_ok=True)
    file = EventsFile(folder / "trace" / f"{name}.jsonl", 1 << 20)
    for line in lines:
        file.write(line)
    file.close(CloseLine(lines[-1].ns))


def test_spans_counters_and_instants_are_in_the_merged_file(tmp_path):
    with trace.open_tracer(tmp_path, "trainer", 2), trace.span("step", version=3, samples=16):
        trace.instant("published", version=4, name="v4")
        with trace.span("optimizer"):
            trace.counter("queue", waiting=3, scored=12.5)
    events = merged(tmp_path)
    assert [(event["ph"], event["name"], event.get("args")) for event in events] == [
        ("B", "step", {"version": 3, "samples": 16}),
        ("i", "published", {"version": 4, "name": "v4"}),
        ("B", "optimizer", {}),
        ("C", "queue", {"waiting": 3.0, "scored": 12.5}),
        ("E", "optimizer", None),
        ("E", "step", None),
    ]
    everything = check_trace(tmp_path / "trace.json")
    assert process_names(everything) == {1: "trainer 2"}
    assert [event["args"]["name"] for event in everything if event["name"] == "thread_name"] == ["MainThread"]
    assert notices(tmp_path / "trace.json") == []


def test_a_phase_of_the_clock_is_a_span(tmp_path):
    clock = PhaseClock()
    with trace.open_tracer(tmp_path, "trainer", 0), pytest.raises(RuntimeError), clock.phase("rollout"):
        raise RuntimeError
    assert [(event["ph"], event["name"]) for event in merged(tmp_path)] == [("B", "rollout"), ("E", "rollout")]


def test_without_a_tracer_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with trace.span("step", name="any"):
        trace.counter("queue", waiting=1)
        trace.instant("mark")
        trace.flush()
    assert list(tmp_path.iterdir()) == []


def test_each_thread_has_its_own_spans(tmp_path):
    barrier = threading.Barrier(3)

    def work():
        for _ in range(50):
            barrier.wait()  # so that spans of all threads are open at once
            with trace.span("outer"), trace.span("inner"):
                barrier.wait()

    with trace.open_tracer(tmp_path, "rollout", 0):
        threads = [threading.Thread(target=work, name=f"engine {i}") for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = merged(tmp_path)
    assert len(events) == 3 * 50 * 4
    assert len({event["tid"] for event in events}) == 3


def test_a_span_that_ends_inside_another_is_a_programming_error(tmp_path):
    with trace.open_tracer(tmp_path, "trainer", 0):
        outer = trace.span("outer")
        outer.__enter__()
        trace.span("inner").__enter__()
        with pytest.raises(AssertionError, match="'outer' ends inside span 'inner'"):
            outer.__exit__(None, None, None)


def test_arguments_that_json_does_not_know_are_written_as_text(tmp_path):
    with trace.open_tracer(tmp_path, "trainer", 0), trace.span("step", path=tmp_path, loss=float("nan")):
        pass
    assert merged(tmp_path)[0]["args"] == {"path": str(tmp_path), "loss": None}


def test_a_counter_holds_finite_numbers(tmp_path):
    with trace.open_tracer(tmp_path, "trainer", 0):
        trace.counter("staleness", mean=float("nan"), max=2)
        trace.counter("staleness", mean=float("inf"))
        with pytest.raises(ValueError, match="'staleness': mean = 'high' is no number"):
            trace.counter("staleness", mean="high")
    assert [event["args"] for event in merged(tmp_path)] == [{"max": 2.0}]


@pytest.mark.parametrize(("role", "rank", "limit"), [("a/b", 0, 1), ("", 0, 1), ("trainer", -1, 1), ("trainer", 0, 0)])
def test_what_cannot_be_a_tracer_is_refused(tmp_path, role, rank, limit):
    with pytest.raises(ValueError, match=r"names? a file|leaves no room"):
        Tracer(tmp_path, role, rank, max_mb=limit)


def test_a_process_has_one_tracer(tmp_path):
    with trace.open_tracer(tmp_path, "trainer", 0):
        with pytest.raises(ValueError, match="already writes the trace"):
            trace.open_tracer(tmp_path, "trainer", 1).__enter__()
        trace.instant("still here")
    assert len(merged(tmp_path)) == 1


def test_a_run_without_a_trace_cannot_be_merged(tmp_path):
    with pytest.raises(ValueError, match="has no events of any process"):
        merge_trace(tmp_path)


def test_a_second_start_has_a_file_of_its_own(tmp_path):
    for _ in range(2):
        with trace.open_tracer(tmp_path, "rollout", 1):
            trace.instant("mark")
    merged(tmp_path)
    assert process_names(check_trace(tmp_path / "trace.json")) == {1: "rollout 1", 2: "rollout 1 (start 2)"}


def test_a_forked_child_does_not_write_its_parents_events(tmp_path):
    with trace.open_tracer(tmp_path, "trainer", 0) as tracer:
        trace.instant("before the fork")
        child = os.fork()
        if child == 0:
            trace.instant("in the child")
            tracer.flush()
            os._exit(0)
        os.waitpid(child, 0)
    assert [event["name"] for event in merged(tmp_path)] == ["before the fork"]


# The limit


def test_events_beyond_the_limit_are_counted_and_told_of(tmp_path):
    tracer = Tracer(tmp_path, "trainer", 0, max_mb=0.01)
    with tracer.span("whole run"):
        for number in range(1000):
            with tracer.span("step", number=number):
                pass
    with pytest.warns(UserWarning, match=r"\d+ events were left out of .*trainer-0-1.jsonl"):
        tracer.close()
    assert tracer.path.stat().st_size < 1.1 * 0.01 * (1 << 20)
    said = []
    events = check_trace(merge_trace(tmp_path, say=said.append))
    begun = sum(event["ph"] == "B" for event in events)
    assert 10 < begun < 1000
    assert tracer.left_out == 1001 - begun  # of a span that is left out, one event is counted
    note = f"trainer-0-1.jsonl leaves out {tracer.left_out} events"
    assert note in notices(tmp_path / "trace.json")[0]
    assert note in said[0]
    assert [event["name"] for event in events if event["ph"] == "i"] == ["events file is full: from here on left out"]


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path, recwarn):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with trace.open_tracer(tmp_path, "trainer", 0) as tracer:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
            for number in range(5000):
                trace.instant("mark", number=number)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    numbers = [event["args"]["number"] for event in merged(tmp_path)]
    assert numbers == list(range(len(numbers)))
    assert 10 < len(numbers) < 5000
    assert tracer.left_out + len(numbers) >= 5000
    assert sum("ends here, it cannot be written" in str(warning.message) for warning in recwarn) == 1
    assert "trainer-0-1.jsonl has no end" in notices(tmp_path / "trace.json")[0]


# Killed processes


def test_a_process_killed_while_writing_loses_no_more_than_its_buffer(tmp_path):
    written = children.context.Value("q", 0, lock=False)
    for count in (1, 3_000):
        folder = tmp_path / str(count)
        process = children.start(children.write_for_ever, folder, written)
        while written.value < count:
            assert process.is_alive()
            time.sleep(0.001)
        process.kill()
        process.join()
        (path,) = (folder / "trace").iterdir()
        lines, _ = read(path)  # each complete line can be read
        numbers = [line.args["number"] for line in lines if isinstance(line, BeginLine) and line.name == "answer"]
        assert numbers == list(range(len(numbers)))
        bytes_per_span = 100  # at least: a beginning and an end
        assert (written.value - len(numbers)) * bytes_per_span <= BUFFER_BYTES + bytes_per_span
        begun = [event for event in merged(folder) if event["ph"] == "B"]
        assert len(begun) in (len(numbers), len(numbers) + 1)  # and "life", once anything has been written
        assert "rollout-3-1.jsonl has no end: its process still runs or was killed" in notices(folder / "trace.json")
        written.value = 0


def test_what_a_waiting_process_was_doing_is_known_when_it_is_killed(tmp_path):
    written = children.context.Value("q", 0, lock=False)
    process = children.start(children.write_then_wait, tmp_path, written)
    end = time.monotonic() + 60
    while written.value == 0 or len(read(next((tmp_path / "trace").iterdir()))[0]) < 2:  # flushed without a next event
        assert process.is_alive()
        assert time.monotonic() < end
        time.sleep(0.01)
    process.kill()
    process.join()
    begin, end = merged(tmp_path)
    assert (begin["ph"], begin["name"], begin["args"]) == ("B", "score", {"number": 1})
    assert end["args"] == {"unfinished": True}


@given(cut=st.integers(0, 4000))
@settings(max_examples=40, deadline=None)
def test_a_file_cut_anywhere_merges(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("cut")
    with trace.open_tracer(folder, "trainer", 0), trace.span("run"):
        for number in range(15):
            with trace.span("step", number=number):
                trace.counter("queue", waiting=number)
    (path,) = (folder / "trace").iterdir()
    path.write_bytes(path.read_bytes()[:cut])
    lines, _ = read(path)
    if not lines:
        with pytest.raises(ValueError, match="has no events"):
            merge_trace(folder)
        return
    events = merged(folder)
    assert sum(event["ph"] == "B" for event in events) == sum(isinstance(line, BeginLine) for line in lines)


def test_a_damaged_line_is_left_out_and_told_of(tmp_path):
    with trace.open_tracer(tmp_path, "trainer", 0) as tracer:
        for number in range(3):
            trace.instant("mark", number=number)
    lines = tracer.path.read_bytes().splitlines(keepends=True)
    lines[2] = b'{"line":"instant","ns":1\x00\n'
    tracer.path.write_bytes(b"".join(lines))
    shutil.copy(tracer.path, tracer.path.with_name("empty-0-1.jsonl"))
    tracer.path.with_name("empty-0-1.jsonl").write_bytes(b'{"li')
    assert [event["args"]["number"] for event in merged(tmp_path)] == [0, 2]
    assert notices(tmp_path / "trace.json") == [
        "trainer-0-1.jsonl has 1 lines that cannot be read; they are left out",
        "1 files of processes that were killed at once hold nothing",
    ]


# Several processes and clocks


def test_three_processes_are_ordered_on_one_clock(tmp_path):
    steps = 20
    stations = [("rollout", "rollout"), ("teacher", "score"), ("trainer", "train")]
    queues = [children.context.Queue() for _ in range(4)]
    processes = [
        children.start(children.relay, tmp_path, role, name, steps, queues[i], queues[i + 1])
        for i, (role, name) in enumerate(stations)
    ]
    for step in range(steps):
        queues[0].put(step)
    assert [queues[3].get(timeout=120) for _ in range(steps)] == list(range(steps))
    for process in processes:
        process.join()
        assert process.exitcode == 0

    events = merged(tmp_path)
    names = process_names(check_trace(tmp_path / "trace.json"))
    assert names == {1: "trainer 0", 2: "rollout 0", 3: "teacher 0"}  # in the order of their roles
    assert sum(event["ph"] == "C" for event in events) == 3 * steps
    for (role, name), (next_role, next_name) in itertools.pairwise(stations):
        ends = [e["ts"] for e in events if names[e["pid"]] == f"{role} 0" and (e["ph"], e["name"]) == ("E", name)]
        begins = [
            e["ts"] for e in events if names[e["pid"]] == f"{next_role} 0" and (e["ph"], e["name"]) == ("B", next_name)
        ]
        assert len(ends) == len(begins) == steps
        # A span begins only after the one before it in the chain has ended.
        assert all(end <= begin for end, begin in zip(ends, begins, strict=True))


@given(
    offset=st.integers(-(10**18), 10**18),
    exchanges=st.lists(st.tuples(*[st.integers(0, 10**9)] * 3), min_size=1, max_size=10),
)
def test_the_estimated_offset_is_within_its_bound(offset, exchanges):
    samples = [ClockSample(sent, sent + there + offset, sent + there + back) for sent, there, back in exchanges]
    estimate = ClockOffset.estimate(samples)
    assert abs(estimate.offset_ns - offset) <= estimate.error_ns
    assert estimate.error_ns == min((there + back + 1) // 2 for _, there, back in exchanges)


def test_an_offset_needs_exchanges():
    with pytest.raises(ValueError, match="at least one exchange"):
        ClockOffset.estimate([])
    with pytest.raises(ValueError, match="an answer before its question"):
        ClockOffset.estimate([ClockSample(5, 0, 4)])


HERE = ProcessLine(1_000_000, "trainer", 0, 10, "host-a", "machine-a", 50_000_000)


def test_an_aligned_machine_is_on_the_runs_clock(tmp_path):
    write(tmp_path, "a", HERE, InstantLine(2_000_000, 1, "one", {}, "MainThread"), InstantLine(6_000_000, 1, "three"))
    # This machine's clock is 900 ms ahead, and its wall clock is wrong by an hour, which must not matter.
    there = ProcessLine(901_000_000, "rollout", 0, 11, "host-b", "machine-b", 3_600_000_000_000)
    write(
        tmp_path,
        "b",
        there,
        BeginLine(904_000_000, 1, "two", {}, "MainThread"),
        ClockLine(905_000_000, "machine-a", -900_000_000, 20_000),
        EndLine(907_000_000, 1),
        ClockLine(908_000_000, "machine-a", -900_700_000, 30_000),  # it has drifted
        InstantLine(909_000_000, 1, "four"),
    )
    times = {(event["name"], event["ph"]): event["ts"] for event in merged(tmp_path)}
    assert times == {("one", "i"): 1e3, ("two", "B"): 3e3, ("three", "i"): 5e3, ("two", "E"): 6e3, ("four", "i"): 7.3e3}
    assert notices(tmp_path / "trace.json") == ["clocks of other machines are aligned within 30 us"]


def test_time_does_not_go_back_when_a_clock_is_set_back(tmp_path):
    lines = [BeginLine(2_000_000, 1, "a", {}, "MainThread"), EndLine(3_000_000, 1)]
    lines += [ClockLine(3_000_000, "m", -500_000, 1), CounterLine(3_100_000, "q", {"n": 1.0})]
    lines += [InstantLine(4_000_000, 1, "b")]
    write(tmp_path, "a", HERE, ClockLine(1_000_000, "m", 0, 1), *lines)
    assert [event["ts"] for event in merged(tmp_path)] == [1e3, 2e3, 2e3, 2.5e3]


def test_clocks_that_were_not_aligned_are_put_together_by_wall_clocks(tmp_path):
    write(tmp_path, "a", HERE, InstantLine(2_000_000, 1, "one", {}, "MainThread"))
    later = ProcessLine(77_000_000, "trainer", 0, 10, "host-a", "machine-a, booted again", 60_000_000)
    write(tmp_path, "b", later, InstantLine(78_000_000, 1, "two", {}, "MainThread"))
    assert [event["ts"] for event in merged(tmp_path)] == [1e3, 11e3]
    assert "the events are on 2 clocks" in notices(tmp_path / "trace.json")[0]


def test_a_tracer_can_be_aligned(tmp_path):
    with trace.open_tracer(tmp_path, "trainer", 0):
        trace.instant("here")
    with trace.open_tracer(tmp_path, "rollout", 0) as tracer:
        tracer.align(ClockOffset(10**12, 7000), "another machine")
        trace.instant("there")
    clocks = [line for line in read(tracer.path)[0] if isinstance(line, ClockLine)]
    assert [(line.machine, line.offset_ns, line.error_ns) for line in clocks] == [("another machine", 10**12, 7000)]
    assert machine_id() != "another machine"
    merged(tmp_path)

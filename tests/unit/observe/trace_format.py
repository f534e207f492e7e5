"""Whether a file keeps to the trace event format, as far as this project uses it."""

from __future__ import annotations

import json
import math
from pathlib import Path

PHASES = {"B", "E", "C", "i", "M"}
METADATA = {"process_name", "process_labels", "process_sort_index", "thread_name"}


def check_trace(path: Path) -> list[dict]:
    """The events of a trace file; an AssertionError for what a reader could stumble over."""
    trace = json.loads(path.read_text(), parse_constant=_refuse)
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    events = trace["traceEvents"]
    named: set[int] = set()
    named_threads: set[tuple[int, int]] = set()
    open_spans: dict[tuple[int, int], list[str]] = {}
    newest = 0.0
    for event in events:
        assert event["ph"] in PHASES, event
        assert isinstance(event["name"], str), event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert isinstance(event.get("args", {}), dict), event
        thread = (event["pid"], event["tid"])
        if event["ph"] == "M":
            assert event["name"] in METADATA, event
            named |= {event["pid"]} if event["name"] == "process_name" else set()
            named_threads |= {thread} if event["name"] == "thread_name" else set()
            continue
        assert event["pid"] in named, f"no process_name before {event}"
        assert math.isfinite(event["ts"]), event
        assert event["ts"] >= newest, f"{event} is earlier than the event before it"
        newest = event["ts"]
        if event["ph"] == "B":
            assert thread in named_threads, event
            open_spans.setdefault(thread, []).append(event["name"])
        elif event["ph"] == "E":
            assert open_spans[thread].pop() == event["name"], f"{event} ends another span than the innermost"
        elif event["ph"] == "C":
            assert event["args"], event
            assert all(isinstance(value, (int, float)) for value in event["args"].values()), event
        else:
            assert event["s"] in ("t", "p", "g"), event
    assert not any(open_spans.values()), f"spans without an end: {open_spans}"
    return events


def notices(path: Path) -> list[str]:
    return json.loads(path.read_text())["otherData"]["notices"]


def process_names(events: list[dict]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON number")

"""The benchmark of the schedule: its limit, what it reads of a run, and the whole script on tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_schedule import SCHEDULES, SMOKE, Alone, Measured, Repeat, read_run, table

ROOT = Path(__file__).parents[2]


def measured(tokens_per_second: float) -> Measured:
    return Measured(tokens_per_second, 20.0, 300.0, 1.0, {"train": 0.1})


def test_the_limit_is_that_of_the_group_with_the_larger_sum():
    rollout, training = Alone({"rollout": 2.0}, tokens=100), Alone({"score": 1.0, "train": 3.0}, tokens=80)
    assert Repeat(rollout, training, {}).limit == pytest.approx(80 / 4)
    assert Repeat(training, rollout, {}).limit == pytest.approx(80 / 4)


def test_shares_of_the_limit_are_taken_within_a_repeat():
    """Both repeats reach half of their own limit; the second machine is twice as fast."""
    repeats = [
        Repeat(Alone({"rollout": 1.0}, n), Alone({"score": 1.0}, 10 * n), dict.fromkeys(SCHEDULES, measured(n / 2)))
        for n in (100, 200)
    ]
    for line in table(repeats).splitlines()[-len(SCHEDULES) :]:
        assert "| 75 (50 - 100) | 50.0 (50.0 - 50.0) % | 1.00 | 300 (300 - 300) |" in line


def test_a_run_is_measured_from_the_end_of_its_warm_up(tmp_path):
    steps = range(1, SMOKE.warmup + SMOKE.steps + 1)
    rows = [
        {"step": step, "kind": "train", "time": 100.0 + 2 * step, "tokens": 10 * step, "seconds/train": 1.0}
        for step in steps
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "workers").mkdir()
    log = tmp_path / "workers" / "conductor.log"
    log.write_text("10:00:00 conductor INFO headers of 4 answers: 300 bytes came in, 500 went out\n")
    found = read_run(tmp_path, SMOKE)
    assert found.tokens_per_second == pytest.approx((20 + 30) / 4)
    assert found.header_bytes_per_answer == 200
    assert found.phases == {"train": 1.0}
    log.write_text("killed\n")
    with pytest.raises(RuntimeError, match="does not tell the bytes of headers"):
        read_run(tmp_path, SMOKE)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_script_measures_all_schedules(tmp_path):
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))[:2]]
    command = [sys.executable, "scripts/bench_schedule.py", "--smoke", "--repeats", "1", "--json", tmp_path / "lines"]
    command += ["--cores", *cores, "--trace", tmp_path / "traces", "--plot", tmp_path / "plot.svg"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, (tmp_path / "lines").read_text().splitlines())
    assert set(line["schedules"]) == set(SCHEDULES)
    for name, one in line["schedules"].items():
        assert f"| {name} |" in done.stdout
        assert one["tokens_per_second"] > 0
        assert 0 < one["header_bytes_per_answer"] < 1024
    assert line["schedules"]["sync"]["staleness"] == 0
    assert ElementTree.parse(tmp_path / "plot.svg").getroot().tag.endswith("svg")
    assert len(list((tmp_path / "traces").glob("*/trace.json"))) == len(SCHEDULES)

"""The simulated cluster against sums done by hand, and the script that prints it."""

from __future__ import annotations

import json

import pytest
import simulate_schedule

from titan_opd.schedule import ScheduleRules
from titan_opd.schedule.simulated_engine import SimulatedEngine
from titan_opd.schedule.simulation import Cluster, simulate

# All answers have 100 tokens: one device writes 4 of them in 100 * (0.01 + 4 * 0.01) = 5 s, they are scored in 4 s
# and trained in 2 s, and new weights take 1 s.
EVEN = Cluster(
    num_rollout=1,
    num_trainer=1,
    num_teacher=1,
    slots=4,
    decode_seconds=0.01,
    decode_seconds_per_row=0.01,
    score_tokens_per_second=100.0,
    train_tokens_per_second=200.0,
    update_seconds=1.0,
    pause_seconds=0.0,
    median_length=100.0,
    length_sigma=0.0,
    max_length=1000,
)
UNEVEN = Cluster(num_rollout=2, num_trainer=1, slots=8, length_sigma=1.0, median_length=500.0, max_length=4000)


def test_a_synchronous_step_takes_the_sum_of_its_phases():
    outcome = simulate(EVEN, ScheduleRules(4), steps=6, warmup=2, phases_overlap=False)
    assert outcome.seconds_per_step == pytest.approx(5 + 4 + 2 + 1)
    assert outcome.tokens_per_second == pytest.approx(400 / 12)
    assert outcome.rollout_busy == pytest.approx(5 / 12)
    assert outcome.rollout_rows == pytest.approx(4 * 5 / 12)
    assert outcome.teacher_busy == pytest.approx(4 / 12)
    assert outcome.trainer_busy == pytest.approx(2 / 12)
    assert outcome.staleness == {0: 1.0}


def test_an_asynchronous_step_takes_as_long_as_the_slowest_role():
    outcome = simulate(EVEN, ScheduleRules(4, 4, "async"), steps=60, warmup=20)
    assert outcome.seconds_per_step == pytest.approx(5, rel=0.02)
    assert outcome.rollout_busy == pytest.approx(1, rel=0.02)


def test_a_teacher_beside_the_trainer_takes_its_time_from_the_trainer():
    cluster = Cluster(**{**vars(EVEN), "num_teacher": 0})
    outcome = simulate(cluster, ScheduleRules(4, 4, "async"), steps=60, warmup=20)
    assert outcome.seconds_per_step == pytest.approx(6, rel=0.02)
    assert outcome.teacher_busy + outcome.trainer_busy == pytest.approx(1, rel=0.02)


def test_an_engine_stands_still_while_new_weights_are_written():
    cluster = Cluster(**{**vars(EVEN), "pause_seconds": 3.0})
    outcome = simulate(cluster, ScheduleRules(4), steps=6, warmup=2, phases_overlap=False)
    assert outcome.seconds_per_step == pytest.approx(5 + 4 + 2 + 1 + 3)


@pytest.mark.parametrize("on_limit", ["wait", "mask", "drop"])
@pytest.mark.parametrize("in_flight", ["keep", "wait", "restart"])
@pytest.mark.parametrize("staleness", [1, 3])
def test_no_trained_token_is_staler_than_allowed(on_limit, in_flight, staleness):
    rules = ScheduleRules(8, staleness, "async", on_limit, in_flight)
    outcome = simulate(UNEVEN, rules, steps=40, warmup=0)
    assert max(outcome.staleness) <= staleness
    assert sum(outcome.staleness.values()) == pytest.approx(1.0)
    assert (outcome.dropped > 0) <= (on_limit == "drop")
    assert (outcome.masked > 0) <= (on_limit == "mask")
    assert (outcome.restarted > 0) <= (in_flight == "restart")


def test_staleness_buys_speed():
    speeds = [
        simulate(UNEVEN, ScheduleRules(8, staleness, "async"), steps=60, warmup=10).tokens_per_second
        for staleness in (0, 1, 4)
    ]
    assert speeds == sorted(speeds)
    assert speeds[2] > 1.5 * speeds[0]


def test_lengths_are_lognormal_and_limited():
    cluster = Cluster(median_length=1000.0, length_sigma=1.0, max_length=3000)
    lengths = sorted(cluster.length(number) for number in range(2001))
    assert lengths[1000] == pytest.approx(1000, rel=0.1)
    assert lengths[317] == pytest.approx(1000 / 2.718, rel=0.15)  # one standard deviation below: 15.9 %
    assert lengths[-1] == 3000
    assert cluster.length(7) == cluster.length(7)


def test_an_answer_knows_which_version_wrote_each_token():
    engine = SimulatedEngine("e", slots=2, decode_seconds=1.0, decode_seconds_per_row=0.5)
    engine.start("a", 0, length=10)
    assert engine.seconds_to_next_answer(0.0) == 15.0
    engine.advance(6.0)  # 4 tokens
    engine.update(3, resume=8.0)
    assert engine.seconds_to_next_answer(6.0) == 2.0 + 6 * 1.5
    engine.start("b", 1, length=3)
    assert engine.seconds_to_next_answer(6.0) == 2.0 + 3 * 2.0
    engine.advance(14.0)
    assert engine.finish() == ("b", 1, [(3, 3)])
    engine.advance(14.0 + 3 * 1.5)
    assert engine.finish() == ("a", 0, [(0, 4), (3, 6)])
    assert engine.seconds_to_next_answer(20.0) is None


def test_there_is_something_to_measure():
    with pytest.raises(ValueError, match="warmup = 5 of steps = 5"):
        simulate(EVEN, ScheduleRules(4), steps=5, warmup=5)


def test_the_script_prints_a_row_and_writes_a_line_for_each_schedule(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    options = "--batch 8 --slots 4 --steps 5 --warmup 1 --staleness 1 2 --max-length 500 --median-length 200"
    simulate_schedule.main([*options.split(), "--json", str(file)])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["schedule"] for line in lines] == ["sync", "sync, colocated", *2 * ["step_off"], *2 * ["async"]]
    assert len(rows) == 2 + len(lines)
    assert {len(row.split("|")) for row in rows} == {12}
    assert lines[0]["cluster"]["max_length"] == 500

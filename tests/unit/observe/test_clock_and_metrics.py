"""Time by phase, and numbers on disk."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titan_opd.observe import MetricsWriter, PhaseClock, PhaseTimes, phase_table, read_metrics


def test_phases_add_up_and_start_anew():
    clock = PhaseClock()
    for _ in range(2):
        with clock.phase("rollout"):
            pass
        clock.count_tokens("rollout", 10)
    times = clock.take()
    assert times.tokens == {"rollout": 20}
    assert times.seconds["rollout"] > 0
    assert clock.take().seconds == {}


def test_a_phase_inside_a_phase_is_a_programming_error():
    clock = PhaseClock()
    with clock.phase("rollout"), pytest.raises(AssertionError, match="'score' starts inside phase 'rollout'"):
        clock.phase("score").__enter__()


def test_a_failed_phase_is_closed():
    clock = PhaseClock()
    with pytest.raises(RuntimeError), clock.phase("rollout"):
        raise RuntimeError
    with clock.phase("score"):
        pass
    assert set(clock.take().seconds) == {"rollout", "score"}


def test_times_of_steps_add_and_tokens_are_per_second_of_their_own_phase():
    total = PhaseTimes({"rollout": 1.0, "score": 3.0}, {"rollout": 100}) + PhaseTimes({"rollout": 1.0}, {"rollout": 50})
    assert total.seconds == {"rollout": 2.0, "score": 3.0}
    assert total.tokens_per_second() == {"rollout": 75.0}
    assert total.metrics()["tokens_per_second/rollout"] == 75.0
    assert [str(cell) for cell in phase_table(total).columns[2].cells] == ["40%", "60%"]


def test_phases_of_all_steps_stand_in_the_order_in_which_they_first_ran():
    """Names in a set would change places from process to process."""
    names = [f"phase {i}" for i in range(20)]
    total = PhaseTimes({names[0]: 1.0}) + PhaseTimes(dict.fromkeys(names, 1.0), dict.fromkeys(names, 3))
    assert list(total.seconds) == list(total.tokens) == names
    assert total.seconds[names[0]] == 2.0


def test_metrics_are_lines_of_json_and_tensorboard_scalars(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write(1, "train", {"loss": 2.5})
    writer.write(1, "evaluation", {"accuracy": 0.5, "example": "1+1=2"})
    writer.close()
    assert read_metrics(tmp_path, "train")[0]["loss"] == 2.5
    assert [record["kind"] for record in read_metrics(tmp_path)] == ["train", "evaluation"]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(1, 2.5)]
    assert board.Tags()["scalars"] == ["train/loss", "evaluation/accuracy"]


def test_each_line_is_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(3, "train", {"loss": 1.0})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())  # the writer is still open
    assert (line["step"], line["loss"]) == (3, 1.0)
    assert not (tmp_path / "tensorboard").exists()
    writer.close()

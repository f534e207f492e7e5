"""The journal says which samples each step has trained, once each, however often the run was cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.trajectories import make_trajectories
from titan_opd.observe.lines import read_lines
from titan_opd.schedule import Journal, TrainedSample


def samples_of(step):
    trajectories = make_trajectories(4, vocab_size=9, seed=step)
    return [
        TrainedSample(number=4 * (step - 1) + i, epoch=0, repeat=i % 2, prompt=f"p{i}", tokens=len(one.response_ids))
        for i, one in enumerate(trajectories)
    ]


def test_a_line_names_the_samples_in_the_order_of_their_numbers(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    trajectories = make_trajectories(3, vocab_size=9)
    journal.append(5, 4, [TrainedSample.of(one) for one in reversed(trajectories)])
    journal.close()
    (line,) = read_lines(tmp_path / "journal.jsonl")
    assert (line["step"], line["version"]) == (5, 4)
    assert line["samples"] == [
        {"number": i, "epoch": 0, "repeat": 0, "prompt": f"prompt-{i}", "tokens": len(one.response_ids)}
        for i, one in enumerate(trajectories)
    ]


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 200)), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_any_kills_leave_the_journal_of_an_uncut_run(tmp_path_factory, last_step, kills):
    """A run saves some steps, trains some more, dies in the middle of a line, and goes on from what it saved."""
    folder = tmp_path_factory.mktemp("journal")

    def train(path, saved, steps):
        """Go on from the cut `saved` = {step: bytes} for `steps` steps, noting the cut after each."""
        first, length = max(saved.items())
        journal = Journal(path, keep_bytes=length)
        for step in range(first + 1, min(first + steps, last_step) + 1):
            journal.append(step, step - 1, samples_of(step))
            saved[step] = journal.sync()
        journal.close()
        return saved

    train(folder / "whole.jsonl", {0: 0}, last_step)
    path, saved = folder / "killed.jsonl", {0: 0}
    for trained, lost, torn in kills:
        train(path, saved, trained)
        checkpoint = {step: length for step, length in saved.items() if step <= max(saved) - lost} or {0: 0}
        path.write_bytes(path.read_bytes() + b'{"step": 9, "samples": ['[:torn])
        saved = checkpoint
    train(path, saved, last_step)
    assert path.read_bytes() == (folder / "whole.jsonl").read_bytes()
    numbers = [sample["number"] for line in read_lines(path) for sample in line["samples"]]
    assert numbers == list(range(4 * last_step))

"""The probe's gap and its noise floor, from the engines to the metrics of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.workshop import make_workshop
from tests.engines.writing import make_decoder
from tests.helpers.weights import DIGEST_ONLY, Ends, engine_on
from titan_opd.observe import read_metrics
from titan_opd.weights.errors import VerificationError
from titan_opd.weights.gap import floor_metrics, gap_metrics
from titan_opd.weights.manifest import Probe
from titan_opd.weights.probe import probe_ids
from titan_opd.weights.receiver import Checks


def test_the_largest_of_the_newest_gaps() -> None:
    assert gap_metrics([2e-6, None, 3e-6]) == {"weights/probe_gap": 3e-6}
    assert gap_metrics([None]) == gap_metrics([]) == {}


def test_the_floor_is_the_smallest_gap_so_far() -> None:
    floor, found = None, []
    for gap in (None, 3e-6, 2e-6, None, 5e-6):
        metrics = floor_metrics(gap_metrics([gap]), floor)
        floor = metrics.get("weights/probe_floor")
        found.append(floor)
    assert found == [None, 3e-6, 2e-6, 2e-6, 2e-6]


@pytest.mark.parametrize("transport", ["in_process", "channel"])
def test_a_receiver_knows_the_gap_of_its_last_update(tmp_path: Path, transport: str) -> None:
    engine, same = engine_on(0), engine_on(1)
    ids = probe_ids(101)
    with same.update_weights(0) as update:
        expected = [value + 0.01 for value in update.logprobs(ids).tolist()]
        update.is_finished = True
    with Ends(transport, tmp_path) as ends:
        receiver = ends.receiver(Checks())
        ends.publish(make_decoder(seed=1), 1, probe=Probe(ids.tolist(), expected, 0.02))
        receiver.take(engine, ends.store.address, 1)
        assert receiver.probe_gap == pytest.approx(0.01, abs=1e-6)
        ends.publish(make_decoder(seed=1), 2, probe=Probe(ids.tolist(), expected, 0.005))
        with pytest.raises(VerificationError, match=r"differ from the trainer's by 0\.01 nats"):
            receiver.take(engine, ends.store.address, 2)
        receiver = ends.receiver(DIGEST_ONLY)
        receiver.take(engine, ends.store.address, 2)
        assert receiver.probe_gap is None


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_step_of_a_run_says_how_far_its_engines_are(tmp_path: Path, mode: str) -> None:
    workshop = make_workshop(tmp_path)
    options = ("--schedule.mode", mode, *(("--schedule.max_staleness", "1") if mode == "async" else ()))
    run = workshop.train("run", "--checkpoint.every", "1", *options)
    lines = read_metrics(run, "train")
    gaps = [line["weights/probe_gap"] for line in lines]
    assert len(gaps) == 3
    assert all(0 < gap < 1e-4 for gap in gaps)
    assert all(0 < line["mismatch/mean"] <= line["mismatch/max"] < 1e-4 for line in lines[: 3 if mode == "sync" else 1])
    assert [line["weights/probe_floor"] for line in lines] == [min(gaps[:count]) for count in (1, 2, 3)]
    run = workshop.train("unverified", "--weights.verify", "digest", *options)
    assert not any(name.startswith("weights/probe") for line in read_metrics(run, "train") for name in line)

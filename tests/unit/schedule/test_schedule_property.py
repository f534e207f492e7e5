"""Whatever happens, the schedule keeps its promises; and a schedule that does not is found out.

The promises (each a `Violation` in `virtual_run.py`): no token with a weight is staler than `max_staleness`; no sample
is lost or trained twice in the surviving history; every schedule with live workers finishes; what is held is bounded.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.schedule import broken_rules
from tests.unit.schedule.virtual_run import Violation, VirtualRun, any_scenario

EVENTS = {
    "stall",
    "death",
    "silent death",
    "kill",
    "give back",
    "failed update",
    "returned batch",
    "dropped",
    "restarted",
    "masked",
    "lost",
    "ignored",
}


@st.composite
def scenarios(draw):
    return any_scenario(lambda options: draw(st.sampled_from(options)))


def keep_promises(max_examples):
    """Runs `max_examples` schedules and returns what happened in how many."""
    happened = Counter()

    @settings(max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(scenarios())
    def check(scenario):
        happened.update(VirtualRun(scenario).run().happened.keys())

    check()
    return happened


def test_promises_are_kept():
    keep_promises(400)


@pytest.mark.slow
def test_promises_are_kept_in_ten_thousand_schedules():
    happened = keep_promises(10_000)
    assert happened.keys() == EVENTS
    assert min(happened.values()) >= 50, happened


@pytest.mark.parametrize(
    "broken",
    [
        {"conductor": broken_rules.CountsTrainersVersion},
        {"rules": broken_rules.OldestFirstOnly},
        {"conductor": broken_rules.TakesExpiredResults},
        {"rules": broken_rules.StartsAgainAnywhere},
        {"conductor": broken_rules.ReusesLeaseNames},
        {"conductor": broken_rules.ForgetsReturnedSamples},
    ],
    ids=lambda broken: next(iter(broken.values())).__name__,
)
def test_a_broken_schedule_is_found_out(broken):
    with pytest.raises(Violation):
        run_many(range(3000), **broken)
    run_many(range(100))


def run_many(seeds, **broken):
    for seed in seeds:
        VirtualRun(any_scenario(random.Random(seed).choice), **broken).run()

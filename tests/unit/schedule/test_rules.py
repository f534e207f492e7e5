"""The inequalities against what they mean: an assignment of samples to steps that keeps every deadline."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from titan_opd.schedule import ScheduleRules


def can_meet_deadlines(rules, counts, first_step):
    """Whether samples of first versions `counts` fit into the steps from `first_step`, `batch` each, all in time."""
    deadlines = sorted(version + rules.max_staleness for version, count in counts.items() for _ in range(count))
    return all(first_step + place // rules.batch <= deadline for place, deadline in enumerate(deadlines))


rules_of_any_size = st.builds(
    ScheduleRules, batch=st.integers(1, 4), max_staleness=st.integers(0, 4), mode=st.just("async")
)
counts_by_version = st.dictionaries(st.integers(0, 9), st.integers(0, 7), max_size=5)


@given(rules_of_any_size, counts_by_version, st.integers(0, 9))
def test_look_ahead_means_that_the_next_steps_have_room_in_time(rules, left, step):
    assert rules.may_leave(left, step) == can_meet_deadlines(rules, left, step + 1)


@given(rules_of_any_size, counts_by_version, st.integers(0, 9), st.integers(0, 9))
def test_room_means_that_one_more_endangers_no_deadline(rules, counts, version, step):
    assume(can_meet_deadlines(rules, counts, step))
    one_more = {**counts, version: counts.get(version, 0) + 1}
    assert rules.has_room(counts, version, step) == can_meet_deadlines(rules, one_more, step)


def test_admission_counts_versions_batches_and_drops():
    rules = ScheduleRules(batch=4, max_staleness=2, mode="async")
    assert rules.admission_limit(0, num_dropped=0) == 12
    assert rules.admission_limit(5, num_dropped=3) == 35
    assert (rules.deadline(5), rules.min_version(5)) == (7, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "schedule.batch = 0"),
        ({"max_staleness": -1, "mode": "async"}, "max_staleness = -1"),
        ({"max_staleness": 1}, "needs mode = 'step_off' or 'async'"),
        ({"mode": "later"}, "'later' is not one of sync, step_off, async"),
        ({"on_limit": "stop"}, "'stop' is not one of wait, mask, drop"),
        ({"in_flight": "stop"}, "'stop' is not one of keep, wait, restart"),
        ({"mode": "step_off", "on_limit": "drop"}, "no effect with mode = 'step_off'"),
        ({"mode": "step_off", "in_flight": "restart"}, "no effect with mode = 'step_off'"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ScheduleRules(**{"batch": 4, **settings})

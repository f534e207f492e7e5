"""How old the trained tokens are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_opd.observe import staleness_counts, staleness_metrics


def counts(versions, weights, **settings):
    return staleness_counts(torch.tensor(versions, dtype=torch.int32), torch.tensor(weights), **settings)


def test_shares_mean_and_maximum():
    found = counts([7, 7, 5, 6], [1.0, 0.5, 1.0, 0.0], current_version=7, max_staleness=3)
    assert found.tolist() == [2, 0, 1, 0]
    assert staleness_metrics(found) == {
        "staleness/mean": pytest.approx(2 / 3),
        "staleness/max": 2.0,
        "staleness/share_0": pytest.approx(2 / 3),
        "staleness/share_1": 0.0,
        "staleness/share_2": pytest.approx(1 / 3),
        "staleness/share_3": 0.0,
    }


@given(st.data())
def test_counts_of_parts_add_up_to_those_of_the_whole(data):
    bound = data.draw(st.integers(0, 4))
    ages = data.draw(st.lists(st.integers(0, bound), min_size=1, max_size=30))
    weights = data.draw(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=len(ages), max_size=len(ages)))
    cut = data.draw(st.integers(0, len(ages)))
    version = data.draw(st.integers(bound, 1 << 30))
    versions = [version - age for age in ages]
    settings = {"current_version": version, "max_staleness": bound}
    whole = counts(versions, weights, **settings)
    assert torch.equal(
        counts(versions[:cut], weights[:cut], **settings) + counts(versions[cut:], weights[cut:], **settings), whole
    )
    trained = [age for age, weight in zip(ages, weights, strict=True) if weight]
    metrics = staleness_metrics(whole)
    assert metrics["staleness/max"] == max(trained, default=0)
    assert metrics["staleness/mean"] == pytest.approx(sum(trained) / max(len(trained), 1))
    for age in range(bound + 1):
        assert metrics[f"staleness/share_{age}"] == pytest.approx(trained.count(age) / max(len(trained), 1))


def test_too_old_tokens_may_be_there_with_weight_zero_only():
    assert counts([1, 5], [0.0, 1.0], current_version=5, max_staleness=1).tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"version 1 would be trained by the step at version 5, 4 versions later"):
        counts([1, 5], [0.1, 1.0], current_version=5, max_staleness=1)


def test_tokens_of_the_future_are_refused():
    with pytest.raises(ValueError, match="a token of policy version 6 in the step at version 5"):
        counts([5, 6], [1.0, 1.0], current_version=5, max_staleness=1)


def test_no_tokens_are_no_staleness():
    nothing = counts([], [], current_version=5, max_staleness=1)
    assert staleness_metrics(nothing) == {f"staleness/{name}": 0.0 for name in ("mean", "max", "share_0", "share_1")}

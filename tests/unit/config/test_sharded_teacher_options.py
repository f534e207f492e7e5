"""A teacher that the trainer's processes share is refused where they do not score together."""

from __future__ import annotations

import pytest

from tests.unit.config.test_vllm_options import load


def test_a_teacher_that_the_processes_share(tmp_path):
    assert load(tmp_path, {"teacher.sharded": "true"}).teacher.sharded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher.engine": "vllm"}, "teacher.sharded = true spreads the native teacher, and teacher.engine = 'vllm'"),
        ({"teacher.placement": "workers"}, "teacher.placement = 'workers' does not; set it to 'colocated'"),
        ({"rollout.placement": "workers"}, "rollout.placement = 'workers' does not; set it to 'colocated'"),
        ({"schedule.mode": "async"}, "schedule.mode = 'async' does not; set it to 'sync'"),
    ],
)
def test_where_they_do_not_score_together_it_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, {"teacher.sharded": "true"} | options)

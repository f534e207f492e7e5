"""The conductor, one decision at a time; `test_schedule_property.py` has them all at once."""

from __future__ import annotations

import json

import pytest

from tests.unit.data.make import make_prompt
from titan_opd.data import PromptStream
from titan_opd.schedule import AnswerHeader, Batch, Conductor, Release, ScheduleRules, Waiting

PROMPTS = [make_prompt(f"p{i}", [i]) for i in range(7)]


def make_stream(prompts=PROMPTS):
    return PromptStream(prompts, shuffle=True, seed=3, samples_per_prompt=2)


def make_conductor(batch=2, max_staleness=1, mode="async", *, prompts=PROMPTS, incarnation="0", **rules):
    rules = ScheduleRules(batch, max_staleness, mode, **rules)
    return Conductor(rules, make_stream(prompts), lease_seconds=10.0, incarnation=incarnation)


def with_workers(conductor, engines=("e",), teachers=("t",)):
    for name in engines:
        conductor.register(name, "rollout", 0.0)
        conductor.engine_at(name, conductor.version)
    for name in teachers:
        conductor.register(name, "teacher", 0.0)
    return conductor


def start(conductor, count=100, engine="e"):
    return conductor.lease_rollout(engine, count, 0.0)


def finish(conductor, leases, engine="e", last_version=None):
    """Write the answers of `leases`, and score whatever is written."""
    for lease in leases:
        last = lease.version if last_version is None else last_version
        assert conductor.rollout_done(engine, lease.id, AnswerHeader(lease.version, last, 5, f"at {lease.id}"), 0.0)
    score(conductor)


def score(conductor, teacher="t"):
    for lease in conductor.lease_scoring(teacher, 100, 0.0):
        assert conductor.scoring_done(teacher, lease.id, f"scores {lease.id}", 0.0)


def numbers(leases_or_entries):
    return [one.sample.number for one in leases_or_entries]


def train(conductor):
    batch = conductor.next_batch(conductor.version, 0.0)
    assert isinstance(batch, Batch), batch
    conductor.batch_trained(batch.version)
    return batch


def by_number(leases):
    return {lease.sample.number: lease for lease in leases}


# The three modes


@pytest.mark.parametrize("mode", ["sync", "step_off", "async"])
def test_without_staleness_the_batches_are_the_synchronous_schedules(mode):
    conductor = with_workers(make_conductor(4, 0, mode), engines=("e", "f"))
    reference = make_stream()
    for step in range(9):
        leases = start(conductor, 3, "f"), start(conductor)
        finish(conductor, reversed(leases[1]))
        finish(conductor, leases[0], "f")
        batch, expected = conductor.next_batch(step, 0.0), reference.take(4)
        assert [(e.sample.number, e.sample.epoch, e.sample.repeat, e.sample.prompt.id) for e in batch.entries] == [
            (sample.number, sample.epoch, sample.repeat, sample.prompt.id) for sample in expected
        ]
        assert not start(conductor), "nothing may be written for the next version before it exists"
        conductor.batch_trained(step)
        for engine in ("e", "f"):
            conductor.engine_at(engine, step + 1)


def test_an_engine_starts_as_many_as_its_own_version_allows():
    conductor = with_workers(make_conductor(batch=2, max_staleness=1), engines=("e", "old"))
    finish(conductor, start(conductor, 2))
    train(conductor)
    conductor.engine_at("e", 1)
    assert numbers(start(conductor, 3)) == [2, 3, 4]
    assert not start(conductor, engine="old"), "for version 0, four samples are all"
    conductor.engine_at("old", 1)
    assert numbers(start(conductor, engine="old")) == [5]


def test_step_off_waits_for_the_batchs_own_samples_and_async_does_not():
    for mode, expected in (("step_off", None), ("async", [1, 2])):
        conductor = with_workers(make_conductor(batch=2, max_staleness=2, mode=mode))
        leases = by_number(start(conductor))
        assert list(leases) == [0, 1, 2, 3, 4, 5]
        finish(conductor, [leases[1], leases[2]])
        batch = conductor.next_batch(0, 7.0)
        if expected is None:
            assert batch == Waiting("rollout", "samples", (0,), finished=2, since=7.0)
        else:
            assert numbers(batch.entries) == expected


def test_a_data_parallel_rank_gets_what_the_synchronous_schedule_gives_it():
    conductor = with_workers(make_conductor(batch=4, max_staleness=0))
    finish(conductor, start(conductor))
    batch = conductor.next_batch(0, 0.0)
    assert [numbers(batch.share(rank, 2)) for rank in range(2)] == [[0, 2], [1, 3]]


# The limit


def straggler(**rules):
    """Version 1 with sample 0 of version 0 unfinished, sample 1 trained, and more finished samples than a batch."""
    conductor = with_workers(make_conductor(batch=2, max_staleness=1, **rules))
    leases = by_number(start(conductor))
    finish(conductor, [leases[1], leases[2]])
    train(conductor)
    conductor.engine_at("e", 1)
    younger = start(conductor)
    assert numbers(younger) == [4, 5]
    finish(conductor, [leases[3], *younger])
    return conductor, leases[0]


def test_wait_holds_the_step_until_the_deadline_is_kept():
    conductor, late = straggler()
    assert conductor.next_batch(1, 3.0) == Waiting("rollout", "deadline", (0,), finished=3, since=3.0)
    assert conductor.next_batch(1, 4.0).since == 3.0
    finish(conductor, [late], last_version=1)
    assert numbers(train(conductor).entries) == [0, 3]


def test_mask_trains_late_what_is_late():
    conductor, late = straggler(on_limit="mask")
    assert numbers(train(conductor).entries) == [3, 4]
    finish(conductor, [late], last_version=2)
    batch = train(conductor)
    assert numbers(batch.entries) == [0, 5]
    assert batch.min_version == 1  # the tokens of version 0 get weight 0, those of 1 and 2 are trained
    assert conductor.counters.masked == 1


def test_drop_gives_up_what_is_late_and_makes_room_for_another():
    conductor, late = straggler(on_limit="drop")
    assert numbers(train(conductor).entries) == [3, 4]
    assert conductor.counters.dropped == 1
    assert conductor.heartbeat("e", 0.0).cancelled == (late.id,)
    assert not conductor.rollout_done("e", late.id, AnswerHeader(0, 1, 5, "late"), 0.0)
    conductor.engine_at("e", 2)
    assert numbers(start(conductor)) == [6, 7, 8]  # (2 + 1 + 1) batches of 2, and one for the dropped


def test_drops_never_use_up_the_numbers():
    conductor = with_workers(make_conductor(batch=2, max_staleness=1, on_limit="drop"))
    for step in range(30):
        conductor.engine_at("e", step)
        *finished, _never = start(conductor)
        finish(conductor, finished)
        train(conductor)
    assert conductor.counters.dropped > 20
    assert len(conductor.pool) <= 4


def test_restart_writes_a_late_answer_anew_and_only_once():
    conductor, late = straggler(in_flight="restart")
    assert numbers(train(conductor).entries) == [3, 4]
    assert conductor.heartbeat("e", 0.0).cancelled == (late.id,)
    assert (conductor.counters.restarted, conductor.counters.dropped) == (1, 0)
    conductor.engine_at("e", 2)
    again = by_number(start(conductor))
    assert again[0].version == 2
    finish(conductor, [again[number] for number in (6, 7)])
    train(conductor)  # at version 2: 5 and 6
    conductor.engine_at("e", 3)
    finish(conductor, start(conductor))
    assert conductor.next_batch(3, 0.0).numbers == (0,), "written anew once, it is waited for now"
    finish(conductor, [again[0]], last_version=3)
    assert 0 in numbers(train(conductor).entries)


def test_wait_in_flight_empties_an_engine_before_its_update():
    conductor = with_workers(make_conductor(batch=2, max_staleness=3, in_flight="wait"))
    finish(conductor, start(conductor, 3))
    train(conductor)
    assert not start(conductor)
    assert conductor.report(0.0).workers[0].waits_for == "weights"
    conductor.engine_at("e", 1)
    assert start(conductor)


def test_a_lost_sample_does_not_start_where_its_deadline_has_passed():
    conductor = with_workers(make_conductor(batch=2, max_staleness=1), engines=("a", "b", "lagging"))
    finish(conductor, start(conductor, 2, "a"), "a")
    lost = start(conductor, engine="b")
    assert numbers(lost) == [2, 3]
    train(conductor)
    conductor.worker_lost("b")
    conductor.engine_at("a", 1)
    leases = by_number(start(conductor, engine="a"))
    conductor.give_back("a", [leases[2].id, leases[3].id])
    finish(conductor, [leases[4], leases[5]], "a")
    train(conductor)
    # 2 and 3 are below (0 + 1 + 1) * 2, but the last step that may train version 0 is over.
    assert not start(conductor, engine="lagging")
    assert numbers(start(conductor, engine="a")) == [2, 3]


# Leases, losses, payloads


def test_a_silent_worker_loses_its_leases_and_its_late_results_do_not_count():
    conductor = with_workers(make_conductor(max_staleness=0), engines=("e", "f"))
    (lease,) = start(conductor, 1)
    assert conductor.expire(10.0) == []
    conductor.heartbeat("f", 10.0)
    conductor.heartbeat("t", 10.0)
    assert conductor.expire(10.1) == ["e"]
    assert not conductor.rollout_done("e", lease.id, AnswerHeader(0, 0, 5, "late"), 11.0)
    assert conductor.counters.ignored == 1
    assert not conductor.heartbeat("e", 11.0).known
    assert not start(conductor)
    assert numbers(start(conductor, engine="f")) == [0, 1]


def test_any_message_is_a_sign_of_life():
    conductor = with_workers(make_conductor())
    (lease,) = conductor.lease_rollout("e", 1, 6.0)
    conductor.rollout_done("e", lease.id, AnswerHeader(0, 0, 5, "x"), 12.0)
    conductor.lease_scoring("t", 1, 18.0)
    assert conductor.expire(22.0) == []
    assert conductor.expire(23.0) == ["e"]


def test_a_result_counts_once():
    conductor = with_workers(make_conductor())
    (lease,) = start(conductor, 1)
    answer = AnswerHeader(0, 0, 5, "x")
    assert conductor.rollout_done("e", lease.id, answer, 0.0)
    assert not conductor.rollout_done("e", lease.id, answer, 0.0)
    assert conductor.counters.ignored == 1


def test_scores_that_died_are_made_again_from_the_same_answer():
    conductor = with_workers(make_conductor(max_staleness=0), teachers=("t", "u"))
    finish(conductor, start(conductor))
    conductor.worker_lost("t")
    again = conductor.lease_scoring("u", 100, 0.0)
    assert numbers(again) == [0, 1]
    assert [lease.answer.where for lease in again] == ["at 0:0", "at 0:1"]


def test_an_answer_that_died_is_written_again_and_its_scores_are_forgotten():
    conductor = with_workers(make_conductor(max_staleness=0), engines=("e", "f"))
    finish(conductor, start(conductor))
    conductor.worker_lost("e")
    assert conductor.heartbeat("t", 0.0).cancelled == ("0:2", "0:3")
    assert numbers(start(conductor, engine="f")) == [0, 1]


@pytest.mark.parametrize("scored", [False, True])
def test_a_payload_that_cannot_be_fetched_is_made_again(scored):
    conductor = with_workers(make_conductor(max_staleness=0))
    leases = start(conductor)
    for lease in leases:
        conductor.rollout_done("e", lease.id, AnswerHeader(0, 0, 5, "x"), 0.0)
    if scored:
        score(conductor)
    conductor.payload_lost(leases[1].id)
    assert conductor.heartbeat("e", 0.0).cancelled == (leases[1].id,)
    assert conductor.heartbeat("t", 0.0).cancelled == (("0:3",) if scored else ())
    assert numbers(start(conductor)) == [1]
    conductor.payload_lost(leases[1].id)  # is old news
    assert conductor.counters.lost == 1


def test_scores_that_cannot_be_fetched_come_back_with_the_batch():
    conductor = with_workers(make_conductor(max_staleness=0))
    finish(conductor, start(conductor))
    conductor.next_batch(0, 0.0)
    conductor.payload_lost("0:2")
    conductor.return_batch(0)
    assert conductor.heartbeat("t", 0.0).cancelled == ("0:2",)
    assert numbers(conductor.lease_scoring("t", 100, 0.0)) == [0]
    assert conductor.next_batch(0, 0.0).finished == 1


def test_a_trained_batch_names_the_payloads_that_may_go():
    conductor = with_workers(make_conductor(max_staleness=0))
    finish(conductor, start(conductor))
    conductor.next_batch(0, 0.0)
    releases = conductor.batch_trained(0)
    assert set(releases) == {Release("e", "0:0"), Release("e", "0:1"), Release("t", "0:2"), Release("t", "0:3")}


def test_a_returned_batch_is_composed_of_what_is_still_there():
    conductor = with_workers(make_conductor(max_staleness=1), engines=("e", "f"))
    leases = by_number(start(conductor, 1) + start(conductor, 2, "f"))
    finish(conductor, [leases[0]])
    finish(conductor, [leases[1], leases[2]], "f")
    assert numbers(conductor.next_batch(0, 0.0).entries) == [0, 1]
    conductor.worker_lost("e")
    assert numbers(conductor.next_batch(0, 0.0).entries) == [0, 1], "a batch that is out stays as it is"
    conductor.return_batch(0)
    assert numbers(train(conductor).entries) == [1, 2]
    assert numbers(start(conductor, 1, "f")) == [0]


def test_a_failed_update_stops_the_engine_until_the_next_verified_version():
    conductor = with_workers(make_conductor(max_staleness=1))
    start(conductor, 2)
    conductor.engine_failed("e")
    assert not start(conductor)
    conductor.engine_at("e", 0)
    assert numbers(start(conductor)) == [0, 1, 2, 3]


def test_answers_go_to_their_own_teacher():
    prompts = [make_prompt("a", [1], teacher="math"), make_prompt("b", [2], teacher="code")]
    conductor = with_workers(make_conductor(4, 0, prompts=prompts), teachers=())
    conductor.register("m", "teacher", 0.0, teachers=("math",))
    for lease in start(conductor):
        conductor.rollout_done("e", lease.id, AnswerHeader(0, 0, 5, "x"), 0.0)
    assert {lease.sample.prompt.teacher for lease in conductor.lease_scoring("m", 100, 0.0)} == {"math"}
    assert conductor.report(0.0).missing_roles == ("teacher:code",)


def test_a_prompt_that_kills_its_workers_costs_no_memory():
    conductor = with_workers(make_conductor(batch=2, max_staleness=2))
    sizes = set()
    for step in range(200):
        conductor.register("e", "rollout", 0.0)
        conductor.engine_at("e", step)
        leases = by_number(start(conductor))
        finish(conductor, [lease for number, lease in leases.items() if number != 0])
        conductor.give_back("e", [leases[0].id])
        train(conductor)
        sizes.add(len(conductor.pool))
    assert max(sizes) <= 6
    assert len(json.dumps(conductor.snapshot())) < 3000
    assert conductor.snapshot()["anew"][0] == 0


# Cut and resume


def test_a_resumed_schedule_keeps_finished_samples_and_starts_the_others_anew():
    conductor, _late = straggler()
    state = json.loads(json.dumps(conductor.snapshot()))
    assert ([one["number"] for one in state["scored"]], state["anew"]) == ([3, 4, 5], [0])
    resumed = make_conductor(incarnation="1")
    resumed.restore(state, stored={3, 5})
    with_workers(resumed)
    leases = start(resumed)
    assert numbers(leases) == [0, 4]
    assert {lease.version for lease in leases} == {1}
    finish(resumed, leases)
    batch = train(resumed)
    assert numbers(batch.entries) == [0, 3]
    assert {e.sample.number: e.answer.where for e in batch.entries}[3] == "checkpoint"


def test_a_batch_that_is_out_is_untrained_in_the_snapshot():
    conductor = with_workers(make_conductor(max_staleness=0))
    finish(conductor, start(conductor))
    before = conductor.snapshot()
    conductor.next_batch(0, 0.0)
    assert conductor.snapshot() == before


def test_a_trajectory_from_after_the_cut_is_leased_again():
    conductor = with_workers(make_conductor(max_staleness=1))
    finish(conductor, start(conductor))
    train(conductor)
    conductor.engine_at("e", 1)
    finish(conductor, start(conductor))
    state = conductor.snapshot()
    assert [one["last_version"] for one in state["scored"]] == [0, 0, 1, 1]
    state["version"] = 0  # as if the trainer's own state were one step older
    resumed = make_conductor(incarnation="1")
    resumed.restore(state, stored=range(100))
    assert numbers(start(with_workers(resumed))) == []  # numbers 4 and 5 wait for version 1
    assert resumed.snapshot()["anew"] == [4, 5]


def test_results_of_a_former_process_do_not_count():
    conductor = with_workers(make_conductor())
    state = conductor.snapshot()
    (lease,) = start(conductor, 1)
    resumed = make_conductor(incarnation="1")
    resumed.restore(state, stored=())
    start(with_workers(resumed), 1)
    assert not resumed.rollout_done("e", lease.id, AnswerHeader(0, 0, 5, "x"), 0.0)


def test_a_stream_that_others_have_drawn_from_is_refused():
    stream = make_stream()
    stream.take(3)
    conductor = with_workers(Conductor(ScheduleRules(2), stream, lease_seconds=10.0, incarnation="0"))
    with pytest.raises(ValueError, match="stands at sample 3 and the schedule at 0"):
        start(conductor)


def test_only_the_same_settings_resume():
    state = make_conductor().snapshot()
    with pytest.raises(ValueError, match=r"schedule.max_staleness was 1 and is now 2"):
        make_conductor(max_staleness=2).restore(state, stored=())
    with pytest.raises(ValueError, match="num_prompts was 7 and is now 6"):
        make_conductor(prompts=PROMPTS[:6]).restore(state, stored=())
    used = with_workers(make_conductor())
    start(used, 1)
    with pytest.raises(ValueError, match="make a new one"):
        used.restore(state, stored=())


# What is said


def test_the_report_tells_who_waits_for_whom():
    conductor = make_conductor(max_staleness=0)
    assert conductor.report(0.0).missing_roles == ("rollout",)
    with_workers(conductor, engines=("e", "f", "dark"))
    conductor.engine_failed("dark")
    leases = start(conductor)
    report = conductor.report(4.0)
    assert report.queues["writing"] == 2
    assert report.waiting == Waiting("rollout", "samples", (), finished=0, since=4.0)
    assert [(worker.name, worker.waits_for) for worker in report.workers] == [
        ("e", ""),
        ("f", "trainer"),
        ("dark", "weights"),
        ("t", "rollout"),
    ]
    assert [(lease.number, lease.age) for lease in report.workers[0].leases] == [(0, 4.0), (1, 4.0)]
    for lease in leases:
        conductor.rollout_done("e", lease.id, AnswerHeader(0, 0, 5, "x"), 5.0)
    assert conductor.next_batch(0, 5.0).role == "teacher"
    assert conductor.report(6.0).workers[3].waits_for == "itself"
    score(conductor)
    conductor.next_batch(0, 6.0)
    assert json.loads(json.dumps(conductor.report(7.0).as_dict()))["training"] is True


def test_what_cannot_be_true_is_refused():
    conductor = with_workers(make_conductor())
    with pytest.raises(ValueError, match="lease_seconds = 0"):
        Conductor(ScheduleRules(1), make_stream(), lease_seconds=0, incarnation="0")
    with pytest.raises(ValueError, match="role 'cook'"):
        conductor.register("x", "cook", 0.0)
    with pytest.raises(ValueError, match="registered as teacher"):
        conductor.lease_rollout("t", 1, 0.0)
    with pytest.raises(ValueError, match="policy version 1, but the versions made so far are 0 to 0"):
        conductor.engine_at("e", 1)
    with pytest.raises(ValueError, match="'nobody' is no registered rollout worker"):
        conductor.engine_at("nobody", 0)
    with pytest.raises(ValueError, match="trainer is at policy version 3 and the schedule at 0"):
        conductor.next_batch(3, 0.0)
    with pytest.raises(ValueError, match="no batch of policy version 0"):
        conductor.batch_trained(0)
    finish(conductor, start(conductor))
    train(conductor)
    conductor.engine_at("e", 1)
    (lease,) = start(conductor, 1)
    with pytest.raises(ValueError, match="went back from policy version 1 to 0"):
        conductor.engine_at("e", 0)
    for first, last in ((0, 1), (1, 2), (1, 0)):
        with pytest.raises(ValueError, match=f"versions {first} to {last} for a lease at version 1"):
            conductor.rollout_done("e", lease.id, AnswerHeader(first, last, 5, "x"), 0.0)

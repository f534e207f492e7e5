"""Which finished samples make a batch, and which unfinished ones forbid it."""

from __future__ import annotations

from collections.abc import Sequence

from titan_opd.schedule.headers import Batch, BatchEntry, Waiting
from titan_opd.schedule.pool import Entry, SamplePool, Stage
from titan_opd.schedule.rules import ScheduleRules

UNFINISHED = (Stage.WRITING, Stage.WRITTEN, Stage.SCORING)


def urgency(entry: Entry) -> tuple[int, int]:
    """Sorts by deadline, then by number."""
    return entry.version, entry.number


def choose(rules: ScheduleRules, pool: SamplePool, step: int) -> list[Entry]:
    """The finished samples that the step at `step` would take; fewer than a batch when more are not there yet."""
    scored = pool.at(Stage.SCORED)
    if rules.mode == "async":
        return sorted(scored.values(), key=urgency)[: rules.batch] if len(scored) >= rules.batch else [*scored.values()]
    return [scored[number] for number in batch_numbers(rules, step) if number in scored]


def batch_numbers(rules: ScheduleRules, step: int) -> range:
    """The numbers that the step at `step` trains when batches are whole (not in mode "async")."""
    return range(step * rules.batch, (step + 1) * rules.batch)


def blockers(rules: ScheduleRules, pool: SamplePool, chosen: Sequence[Entry], step: int) -> list[Entry]:
    """A smallest set of unfinished samples without which the look-ahead lets `chosen` be trained; empty when it does.

    Of those that would serve alike, the ones that may be written anew come first, then the latest numbers, in which
    the least work is lost.
    """
    left = dict(pool.open_counts)
    for entry in chosen:
        left[entry.version] -= 1
    if rules.may_leave(left, step):
        return []
    unfinished: dict[int, list[Entry]] = {}
    for stage in UNFINISHED:
        for entry in pool.at(stage).values():
            unfinished.setdefault(entry.version, []).append(entry)
    blocking: list[Entry] = []
    candidates: list[Entry] = []
    total = 0
    for version in sorted(left):
        total += left[version]
        candidates += unfinished.get(version, [])
        too_many = total - len(blocking) - max(rules.places(version, step + 1), 0)
        if too_many > 0:
            candidates.sort(key=lambda entry: (entry.restarted, -entry.number))
            blocking += candidates[:too_many]
            del candidates[:too_many]
    return blocking


def may_restart(rules: ScheduleRules, entry: Entry) -> bool:
    """Whether an unfinished answer may be written anew for its deadline's sake."""
    return rules.in_flight == "restart" and not entry.restarted


def must_wait(rules: ScheduleRules, blocking: Sequence[Entry]) -> bool:
    """Whether the step has to wait for some of `blocking`, since nothing else may be done about them."""
    return rules.on_limit == "wait" and not all(may_restart(rules, entry) for entry in blocking)


def waiting(
    rules: ScheduleRules,
    pool: SamplePool,
    chosen: Sequence[Entry],
    blocking: Sequence[Entry],
    step: int,
    since: float,
) -> Waiting:
    """What the step at `step` waits for when `chosen` is no batch yet, or one that is held back by `blocking`."""
    finished = len(pool.at(Stage.SCORED))
    at_teacher = {*pool.at(Stage.WRITTEN), *pool.at(Stage.SCORING)}
    if len(chosen) < rules.batch and rules.mode == "async":
        role = "rollout" if finished + len(at_teacher) < rules.batch else "teacher"
        return Waiting(role, "samples", (), finished, since)
    if len(chosen) < rules.batch:
        reason = "samples"
        numbers = set(batch_numbers(rules, step)) - {entry.number for entry in chosen}
    else:
        reason = "deadline"
        numbers = {entry.number for entry in blocking}
    role = "teacher" if numbers <= at_teacher else "rollout"
    return Waiting(role, reason, tuple(sorted(numbers)), finished, since)


def compose(rules: ScheduleRules, chosen: Sequence[Entry], step: int) -> Batch:
    """The batch of `chosen`, in the order of their numbers."""
    entries = []
    for entry in sorted(chosen, key=lambda entry: entry.number):
        assert entry.answer is not None
        entries.append(BatchEntry(entry.sample, entry.answer, entry.scores_where))
    return Batch(step, rules.min_version(step), tuple(entries))

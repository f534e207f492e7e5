"""The consistent cut: what of the schedule outlives a killed run, and how another process goes on from it.

A snapshot may be taken at any moment and stands for the end of the last trained step: a batch that has been handed out
but not trained is untrained. It keeps the samples that are scored; everything that was still being written or scored
starts anew. Taken where the trainer's own state is taken, the two are one cut.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from titan_opd.schedule.headers import CHECKPOINT, AnswerHeader, Counters
from titan_opd.schedule.pool import Entry, Stage

if TYPE_CHECKING:
    from titan_opd.schedule.conductor import Conductor


def snapshot(conductor: Conductor) -> dict[str, Any]:
    """The schedule as a dict of JSON values.

    `version` policy versions were trained. `stream` is the position of the prompts; of the numbers before it, `anew`
    are to be started, `scored` are finished (their payloads, at `where` and `scores_where`, belong into the
    checkpoint), and all others are trained or dropped. `restarted` are untrained and were written anew once.
    """
    pool = conductor.pool
    return {
        "version": conductor.version,
        "rules": asdict(conductor.rules),
        "stream": pool.stream_state(),
        "scored": [_finished(entry) for entry in sorted(pool, key=lambda entry: entry.number) if _is_finished(entry)],
        "anew": sorted(entry.number for entry in pool if not _is_finished(entry)),
        "restarted": sorted(entry.number for entry in pool if entry.restarted),
        "counters": conductor.counters.state_dict(),
    }


def _is_finished(entry: Entry) -> bool:
    at_hand = not entry.answer_lost and not entry.scores_lost
    return entry.stage is Stage.SCORED or (entry.stage is Stage.BATCHED and at_hand)


def _finished(entry: Entry) -> dict[str, Any]:
    assert entry.answer is not None
    return {"number": entry.number, **asdict(entry.answer), "scores_where": entry.scores_where}


def restore(conductor: Conductor, state: dict[str, Any], stored: Collection[int]) -> None:
    """Go on from `state` in a conductor that has done nothing yet.

    A scored sample is kept if the checkpoint holds its payload and no token is of a version after the cut; it starts
    anew otherwise. Workers register again: what they hold is void.

    Args:
        conductor: fresh, with the stream of the run.
        state: of `snapshot`, perhaps through JSON.
        stored: numbers of the samples whose answers and scores the checkpoint holds.

    Raises:
        ValueError: the rules or the prompts are not those of the run, or the conductor is not fresh.
    """
    if conductor.version or len(conductor.pool):
        raise ValueError("only a conductor that has handed out nothing can be restored; make a new one")
    for name, value in asdict(conductor.rules).items():
        if state["rules"][name] != value:
            raise ValueError(
                f"cannot resume the schedule: schedule.{name} was {state['rules'][name]!r} and is now {value!r}; "
                "resume with the settings the run began with, or begin a new run"
            )
    scored = {finished["number"]: finished for finished in state["scored"]}
    conductor.version = state["version"]
    conductor.counters = Counters(**state["counters"])
    conductor.pool.restore(state["stream"], [*state["anew"], *scored])
    for number in state["restarted"]:
        conductor.pool[number].restarted = True
    for number, finished in scored.items():
        if number in stored and finished["last_version"] <= conductor.version:
            answer = AnswerHeader(
                finished["first_version"], finished["last_version"], finished["num_tokens"], where=CHECKPOINT
            )
            conductor.pool.keep(number, answer, scores_where=CHECKPOINT)

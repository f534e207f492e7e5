"""The rule of the schedule: which sample may start where, and which step may run.

Letters: s max_staleness, B batch, n a sample's number, v the version of an engine or of a sample's first token, w the
version from which a step trains (the step at w is number w, counted from 0), u any version.

A sample whose first token is of version v has the deadline v + s: it must be in the step at version v + s at the
latest. Three inequalities keep every deadline. Each works on counts {version of the first token: samples} of *open*
samples: started, and in no batch yet.

    admission   n < (v + s + 1) B + dropped                    may sample n start at an engine of version v?
    room        open(<= u) + 1 <= (u + s + 1 - w) B, u >= v    ... while w is the next step to be composed?
    look-ahead  left(<= u) <= (u + s - w) B, all u             may the step at w leave these samples behind?

`README.md` beside this file shows why they are a hard bound and why nothing waits forever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from titan_opd.config.schema import ScheduleConfig

MODES = ("sync", "step_off", "async")
ON_LIMIT = ("wait", "mask", "drop")
IN_FLIGHT = ("keep", "wait", "restart")


@dataclass(frozen=True)
class ScheduleRules:
    """The settings of a schedule and the inequalities that follow from them.

    The three modes are one rule. "async" fills a batch with the earliest deadlines among the finished samples.
    "step_off" fills it with the lowest numbers, so that samples w B ... (w + 1) B - 1 are trained together by the step
    at w, at most s batches after the version that wrote them. "sync" is either of them with s = 0.

    Attributes:
        batch: B, samples per policy version.
        max_staleness: s, in versions.
        mode: "sync", "step_off" or "async".
        on_limit: what happens to the answers that the look-ahead makes a step wait for. "wait": it waits. "mask": it
            does not; what comes too late is trained with weight 0 on tokens older than s versions. "drop": they are
            given up and counted.
        in_flight: what an engine does with a new version while it writes answers. "keep": it updates and writes on.
            "wait": it takes no new sample and updates when it is empty. "restart": as "keep", but answers that would
            miss their deadline are written anew, each at most once, before `on_limit` is asked.

    Raises:
        ValueError: for settings outside of these, and for combinations that would have no effect.
    """

    batch: int
    max_staleness: int = 0
    mode: str = "sync"
    on_limit: str = "wait"
    in_flight: str = "keep"

    @classmethod
    def of(cls, schedule: ScheduleConfig) -> ScheduleRules:
        """The rules that a configuration asks for."""
        return cls(**{field.name: getattr(schedule, field.name) for field in fields(cls)})

    def __post_init__(self) -> None:
        for name, choices in (("mode", MODES), ("on_limit", ON_LIMIT), ("in_flight", IN_FLIGHT)):
            if getattr(self, name) not in choices:
                raise ValueError(f"schedule.{name} = {getattr(self, name)!r} is not one of {', '.join(choices)}")
        if self.batch < 1:
            raise ValueError(f"schedule.batch = {self.batch} is no number of samples; set it to at least 1")
        if self.max_staleness < 0:
            raise ValueError(f"schedule.max_staleness = {self.max_staleness} is negative; set it to 0 or more versions")
        if self.mode == "sync" and self.max_staleness > 0:
            raise ValueError(
                f"schedule.max_staleness = {self.max_staleness} needs mode = 'step_off' or 'async'; with mode = 'sync' "
                "no token is stale, so set it to 0"
            )
        if self.mode != "async":
            self._refuse_what_needs_deadlines()

    def _refuse_what_needs_deadlines(self) -> None:
        if self.on_limit != "wait":
            raise ValueError(
                f"schedule.on_limit = {self.on_limit!r} has no effect with mode = {self.mode!r}, whose steps wait for "
                "exactly their own samples; use 'wait', or mode = 'async'"
            )
        if self.in_flight == "restart":
            raise ValueError(
                f"schedule.in_flight = 'restart' has no effect with mode = {self.mode!r}, where no sample misses its "
                "deadline; use 'keep' or 'wait', or mode = 'async'"
            )

    def deadline(self, first_version: int) -> int:
        """v + s: the version of the last step that may train a sample whose first token is of version v."""
        return first_version + self.max_staleness

    def min_version(self, step: int) -> int:
        """w - s: the oldest version that a token may have in the step at w."""
        return step - self.max_staleness

    def admission_limit(self, engine_version: int, num_dropped: int) -> int:
        """(v + s + 1) B + dropped: numbers below it may start at an engine whose verified version is v.

        Args:
            engine_version: verified at that engine; the trainer's own version would admit too much.
            num_dropped: samples given up for good; each makes room for one more number.
        """
        return (engine_version + self.max_staleness + 1) * self.batch + num_dropped

    def has_room(self, open_counts: Mapping[int, int], engine_version: int, next_step: int) -> bool:
        """Whether one more sample can start at version v without endangering a deadline.

        For every u >= v, `open(<= u) + 1 <= (u + s + 1 - w) B`: the steps w ... u + s have that many places. In the
        ordinary course admission implies it; it decides where a sample starts *again* after others overtook it, at
        an engine that lags behind.

        Args:
            open_counts: {version of the first token: open samples}.
            engine_version: v.
            next_step: w, the next step whose batch is not composed yet.
        """
        if self.places(engine_version, next_step) < 1:
            return False
        counts = dict(open_counts)
        counts[engine_version] = counts.get(engine_version, 0) + 1
        return all(
            total <= self.places(version, next_step)
            for version, total in cumulative(counts)
            if version >= engine_version
        )

    def may_leave(self, left_counts: Mapping[int, int], step: int) -> bool:
        """The look-ahead: whether the open samples that the step at w leaves behind can still meet every deadline.

        `left(<= u) <= (u + s - w) B` for every u. With j = u + s - w: at most j B samples have a deadline within the
        j steps after this one.

        Args:
            left_counts: {version of the first token: open samples that are not in the batch}.
            step: w.
        """
        return all(total <= self.places(version, step + 1) for version, total in cumulative(left_counts))

    def places(self, first_version: int, next_step: int) -> int:
        """(v + s + 1 - w) B: places in the steps from w to the deadline of version v; negative when it has passed."""
        return (self.deadline(first_version) + 1 - next_step) * self.batch


def cumulative(counts: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """(version u, samples of versions <= u) for each version that has samples, oldest first."""
    total = 0
    for version in sorted(counts):
        total += counts[version]
        if counts[version]:
            yield version, total

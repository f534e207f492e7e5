"""A rollout device on a virtual clock: continuous batching whose speed depends on how many answers are running."""

from __future__ import annotations

import heapq
from collections.abc import Collection


class SimulatedEngine:
    """Every running answer gets one token each `decode_seconds + rows * decode_seconds_per_row`.

    All rows advance alike, so one count, the tokens that a row present from the start would have got, tells the
    progress of each: an answer that started at count c with N tokens is finished at count c + N.

    Args:
        name: of the worker.
        slots: most answers at the same time.
        decode_seconds, decode_seconds_per_row: of one token of every running answer.
    """

    def __init__(self, name: str, slots: int, decode_seconds: float, decode_seconds_per_row: float) -> None:
        self.name = name
        self.version = 0
        self.plan = 0  # which foreseen event still holds
        self.busy_seconds = 0.0
        self.row_seconds = 0.0
        self._slots = slots
        self._decode_seconds = decode_seconds
        self._decode_seconds_per_row = decode_seconds_per_row
        self._rows: list[tuple[float, str, int, float]] = []  # a heap of (end count, lease, number, start count)
        self._count = 0.0
        self._time = 0.0
        self._updates: list[tuple[float, int]] = [(0.0, 0)]  # (count, the version from there on)

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def num_free(self) -> int:
        return self._slots - len(self._rows)

    @property
    def _seconds_per_token(self) -> float:
        return self._decode_seconds + len(self._rows) * self._decode_seconds_per_row

    def start_measuring(self, now: float) -> None:
        """Count busy time from here."""
        self.advance(now)
        self.busy_seconds = self.row_seconds = 0.0

    def advance(self, now: float) -> None:
        """Write until `now`."""
        seconds = max(0.0, now - self._time)
        if self._rows:
            self._count += seconds / self._seconds_per_token
            self.busy_seconds += seconds
            self.row_seconds += seconds * len(self._rows)
        self._time = max(self._time, now)  # later than `now` while new weights are written

    def start(self, lease: str, number: int, length: int) -> None:
        """Begin an answer of `length` tokens; the engine has advanced to now."""
        heapq.heappush(self._rows, (self._count + length, lease, number, self._count))

    def seconds_to_next_answer(self, now: float) -> float | None:
        """Seconds from `now` until the next answer is finished if nothing changes; None without answers."""
        if not self._rows:
            return None
        left = max(0.0, self._rows[0][0] - self._count)
        return max(0.0, self._time - now) + left * self._seconds_per_token

    def finish(self) -> tuple[str, int, list[tuple[int, int]]]:
        """Take out the answer that is finished: its lease, its number, and its tokens as [(version, tokens)]."""
        end, lease, number, start = heapq.heappop(self._rows)
        self._count = max(self._count, end)  # rounding
        pieces = []
        borders = [*(count for count, _ in self._updates[1:]), float("inf")]
        for (begin, version), border in zip(self._updates, borders, strict=True):
            tokens = round(min(border, end) - start) - round(max(begin, start) - start)
            if tokens > 0:
                pieces.append((version, tokens))
        self._forget_old_updates()
        return lease, number, pieces

    def cancel(self, leases: Collection[str]) -> None:
        """Stop these answers."""
        self._rows = [row for row in self._rows if row[1] not in leases]
        heapq.heapify(self._rows)

    def update(self, version: int, resume: float) -> None:
        """Go on with `version` at time `resume`."""
        self.version = version
        self._updates.append((self._count, version))
        self._time = resume

    def _forget_old_updates(self) -> None:
        oldest = min((row[3] for row in self._rows), default=self._count)
        while len(self._updates) > 1 and self._updates[1][0] <= oldest:
            del self._updates[0]

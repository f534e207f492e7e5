"""Where a step's time goes: seconds and tokens by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from titan_opd.observe import trace


class PhaseClock:
    """Wall-clock seconds and processed tokens by phase name, since the last `take`.

    Phases do not nest: a second counted in one phase is counted in no other, so the phases of a step add up to at most
    the step. In the process's trace a phase is a span of its name.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._tokens: dict[str, int] = defaultdict(int)
        self._running: str | None = None
        self.latest: str | None = None  # the phase that runs, or ran last: where an error comes from

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as part of phase `name`."""
        assert self._running is None, f"phase {name!r} starts inside phase {self._running!r}"
        self._running, self.latest, start = name, name, time.perf_counter()
        try:
            with trace.span(name):
                yield
        finally:
            self._seconds[name] += time.perf_counter() - start
            self._running = None

    def count_tokens(self, name: str, tokens: int) -> None:
        """Add tokens that phase `name` has processed."""
        self._tokens[name] += tokens

    def take(self) -> PhaseTimes:
        """The times since the last call; the clock starts anew."""
        times = PhaseTimes(dict(self._seconds), dict(self._tokens))
        self._seconds.clear()
        self._tokens.clear()
        return times


class PhaseTimes:
    """Seconds and tokens by phase; adds up over steps."""

    def __init__(self, seconds: dict[str, float] | None = None, tokens: dict[str, int] | None = None) -> None:
        self.seconds = seconds or {}
        self.tokens = tokens or {}

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        def add(left: dict, right: dict) -> dict:
            return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}

        return PhaseTimes(add(self.seconds, other.seconds), add(self.tokens, other.tokens))

    def tokens_per_second(self) -> dict[str, float]:
        """Tokens of a phase over the seconds of that phase alone."""
        return {name: count / self.seconds[name] for name, count in self.tokens.items() if self.seconds.get(name)}

    def metrics(self) -> dict[str, float]:
        """`seconds/<phase>` and `tokens_per_second/<phase>`."""
        named = {f"seconds/{name}": value for name, value in self.seconds.items()}
        return named | {f"tokens_per_second/{name}": value for name, value in self.tokens_per_second().items()}

"""The nearest spelling, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: object, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"`, or the empty string when nothing is near."""
    matches = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""

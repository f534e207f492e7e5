"""CPU cores by their numbers, as `taskset` writes them."""

from __future__ import annotations

import re


def parse_cores(text: str, key: str) -> frozenset[int] | None:
    """The cores of a list such as "0-3,8"; None for the empty text: any core.

    Args:
        text: numbers and ranges, separated by commas.
        key: the option, for the error.

    Raises:
        ValueError: it is no such list.
    """
    if not text:
        return None
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise ValueError(f"{key} = {text!r} is no list of cores; write numbers and ranges, such as '0-3,8'")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(cores)

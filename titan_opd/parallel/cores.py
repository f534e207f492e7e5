"""Where a process may run."""

from __future__ import annotations

import os

from titan_opd.config.cores import parse_cores


def pin_to_cores(text: str, option: str) -> None:
    """Keep this process, all its threads to come, and its children to the given cores.

    Args:
        text: a list such as "0-3,8"; empty: anywhere.
        option: what it came from, for the error.

    Raises:
        ValueError: it is no list of cores, or of cores that this process may not use.
    """
    cores = parse_cores(text, option)
    if cores is None:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        allowed = sorted(os.sched_getaffinity(0))
        raise ValueError(f"{option} = {text!r}: this process may run on the cores {allowed} ({error})") from error

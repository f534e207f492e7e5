"""What the tests of this folder let processes of their own do, and how those are started."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.helpers import processes  # noqa: F401  (says what the fork server imports, once for all tests)
from titan_opd.errors import StallError
from titan_opd.observe import RunState, Watchdog, offer_stacks, trace

context = multiprocessing.get_context("forkserver")


def start(target, *args):
    """Run `target(*args)` in a new process."""
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def write_for_ever(folder, written):
    """Numbered spans as fast as possible; `written` tells how many have been begun."""
    with trace.open_tracer(folder, "rollout", 3), trace.span("life"):
        for number in range(1 << 62):
            with trace.span("answer", number=number):
                written.value = number + 1


def write_then_wait(folder, written):
    """A few spans, then silence inside one."""
    with trace.open_tracer(folder, "teacher", 0), trace.span("score", number=1):
        written.value = 1
        time.sleep(3600)


def relay(folder, role, name, steps, take, give):
    """One station of a chain: take a number, work on it inside a span, pass it on."""
    with trace.open_tracer(folder, role, 0):
        for step in range(steps):
            with trace.span("wait"):
                assert take.get(timeout=60) == step
            with trace.span(name, step=step):
                trace.counter("queue", waiting=steps - step)
                time.sleep(0.001)
            give.put(step)


def stall(folder, log, how):
    """A run that stops moving, in one way or another."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    run_forward = {
        "sleep": lambda: time.sleep(3600),
        "swallow": _swallow_the_error,
        "lock in C": lambda: _lock_twice(ctypes.CDLL(None)),
        "interpreter held": lambda: _lock_twice(ctypes.PyDLL(None)),
    }[how]
    watchdog = Watchdog(folder, 0.5, collect=_state_without_workers, grace_seconds=0.5)
    try:
        with trace.open_tracer(folder, "trainer", 0), watchdog:
            watchdog.progress("trainer step")
            run_forward()
    except StallError as error:
        Path(folder, "error.txt").write_text(str(error))
        sys.exit(7)


def outlive_the_watchdog(folder):
    """A pause that begins before the watchdog and one that ends after it."""
    watchdog = Watchdog(folder, 0.2, collect=_state_without_workers, grace_seconds=0.2)
    with watchdog.paused("start"):
        pass
    pause = watchdog.paused("evaluation")
    with watchdog:
        pause.__enter__()
    pause.__exit__(None, None, None)
    time.sleep(1.0)
    sys.exit(7)


def offer_and_sleep(folder, ready):
    with offer_stacks(folder, "teacher", 4):
        a_place_that_the_stacks_name(ready)


def miss_a_collective(folder, rank, log):
    """Two processes, of which only the first comes to the second collective; the first is watched."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stderr.fileno())
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with offer_stacks(folder, "trainer", rank):
        dist.all_reduce(torch.zeros(3))
        if rank:
            somewhere_else()
        dist.all_reduce(torch.zeros(0), group=dist.new_group([0]))  # a group of its own
        parts = [torch.zeros(5, dtype=torch.float64) for _ in range(2)]
        with Watchdog(folder, 1.0, collect=lambda: None, grace_seconds=1.0):
            dist.all_gather(parts, parts[0])


def somewhere_else():
    dist.new_group([0])  # made by all processes
    time.sleep(3600)


def a_place_that_the_stacks_name(ready):
    ready.set()
    time.sleep(3600)


def _state_without_workers():
    return RunState(
        3, 1, 10.0, training=False, waiting_role="rollout", missing_roles=("rollout",), queues={"scored": 0}
    )


def _swallow_the_error():
    while True:
        try:
            time.sleep(3600)
        except StallError:
            continue


def _lock_twice(library):
    """Wait for ever in C, where no signal handler of Python's runs; a zeroed mutex is an open one."""
    mutex = ctypes.create_string_buffer(256)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)

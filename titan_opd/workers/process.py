"""A role as a process of its own: `titan-opd worker`."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from titan_opd.assemble import read_common
from titan_opd.channel import ChannelError, RefusedError
from titan_opd.channel.keys import CONDUCTOR
from titan_opd.config import Config
from titan_opd.observe.out_of_memory import explain_out_of_memory
from titan_opd.observe.stacks import offer_stacks
from titan_opd.observe.trace import open_tracer
from titan_opd.parallel.cores import pin_to_cores
from titan_opd.workers.connection import WORKER, conductor_address, conductor_endpoint, open_transport
from titan_opd.workers.roles import serve_conductor, serve_rollout, serve_teacher

logger = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1


def run_worker(
    config: Config,
    *,
    role: str,
    endpoint: str | None = None,
    name: str | None = None,
    cores: str = "",
    num_ranks: int = 1,
    restore: Path | None = None,
    ends_with_parent: bool = False,
) -> int:
    """Serve a run in one role until it ends.

    Args:
        config: the run's.
        role: "rollout", "teacher" or "conductor".
        endpoint: the conductor's; None: as the configuration says.
        name: unique in the run; None: made of role, host and process.
        cores: where this process may run; empty: anywhere.
        num_ranks: of the trainer, for a conductor.
        restore: the state that a conductor goes on from.
        ends_with_parent: whether to end when the process that started this one does.

    Returns:
        The exit status: 0 when the run has ended, 1 when the conductor is lost.

    Raises:
        ValueError: the conductor does not take this worker, or a setting is wrong.
    """
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {role} %(levelname)s %(message)s")
    if ends_with_parent:
        _end_with_parent()
    pin_to_cores(cores, "--cores")
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    if role == "teacher" and config.teacher.engine == "none":
        raise ValueError("teacher.engine = 'none': this run has no teacher, so no worker of that role can join it")
    if not config.overlaps:
        raise ValueError(
            "schedule.mode = 'sync' with rollout.placement and teacher.placement = 'colocated': this run's trainer "
            "does everything itself, and no worker can join it; for a run with workers set one of them to 'workers', "
            "for the trainer too"
        )
    endpoint = endpoint or conductor_endpoint(config)
    transport = open_transport(config, endpoint, member=CONDUCTOR if role == "conductor" else WORKER)
    common = read_common(config)
    name = name or re.sub(r"[^A-Za-z0-9._-]", "-", f"{role}-{socket.gethostname()}-{os.getpid()}")[:64]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        with _observed(config, role, name):
            if role == "conductor":
                state = None if restore is None else json.loads(restore.read_text())
                stop = threading.Event()
                serve_conductor(config, common, transport, endpoint, num_ranks=num_ranks, restore=state, stop=stop)
            else:
                serve = serve_rollout if role == "rollout" else serve_teacher
                serve(config, common, transport, conductor_address(config, endpoint), name=name, device=device)
    except RefusedError as error:
        raise ValueError(f"{name} cannot join the run: {error}") from error
    except ChannelError as error:
        logger.error("%s", error)
        return 1
    return 0


@contextmanager
def _observed(config: Config, role: str, name: str) -> Iterator[None]:
    """Inside, this process can be asked for its stacks, a device that runs out of memory leaves a snapshot, and the
    process is traced where the configuration says so.

    A worker on another machine may not have the run's folder: what it would write there has no place then.
    """
    folder = Path(config.run.directory)
    if not folder.is_dir():
        yield
        return
    rank = int(re.sub(r".*?(\d*)$", r"\1", name) or 0)
    with ExitStack() as stack:
        stack.enter_context(offer_stacks(folder, role, rank))
        phase = {"rollout": "rollout", "teacher": "score"}.get(role)
        stack.enter_context(explain_out_of_memory(folder, role, rank, phase=lambda: phase))
        if config.observe.trace:
            stack.enter_context(open_tracer(folder, role, rank, max_mb=config.observe.trace_mb))
        yield


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:
        raise ValueError("--ends-with-parent: the process that started this one has ended already")

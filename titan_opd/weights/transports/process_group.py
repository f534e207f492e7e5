"""By a process group: gloo, or NCCL between GPUs. One broadcast serves all engines that ask at the same time.

Engines come, die and return, and a group's members are fixed, so each *round* has a group of its own: whoever asks for
a version signs up in a key-value store at the trainer; a thread there takes all who wait for the same buckets,
makes a group of itself (rank 0) and them, and broadcasts these. A member that dies ends its round for all; the others
ask again.

Neither the store nor gloo encrypts or asks for keys: this is for a network in which every machine is trusted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_opd.weights.errors import TransferError
from titan_opd.weights.manifest import Manifest
from titan_opd.weights.transports.base import Deadline, bucket_memory

logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.02
_SIGN_UP_SECONDS = 5.0
_IN_FLIGHT = 2  # buckets


class ProcessGroupOutlet:
    """The trainer's end; a thread serves the rounds.

    Args:
        host: of this machine, as the engines reach it.
        device: of the buckets.
        timeout: seconds for one broadcast.
    """

    name = "process_group"

    def __init__(self, host: str, device: torch.device, *, timeout: float) -> None:
        self._device = device
        self._timeout = timeout
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._host = host
        self._versions: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._rounds = 0
        self._thread = threading.Thread(target=self._serve, name="weights-process-group", daemon=True)
        self._thread.start()

    def allocate(self, version: int, index: int, num_bytes: int) -> Tensor:
        return bucket_memory(num_bytes).to(self._device)

    def offer(self, version: int, buckets: Sequence[Tensor]) -> Any:
        with self._lock:
            self._versions[version] = list(buckets)
        return [self._host, self._store.port]

    def forget(self, version: int) -> None:
        with self._lock:
            self._versions.pop(version, None)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(self._timeout)
        with self._lock:
            self._versions.clear()

    # ---- The thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        known = 0
        waiting: dict[int, float] = {}  # tickets that were drawn, and when that was seen
        while not self._closing.wait(_POLL_SECONDS):
            drawn = self._store.add("tickets", 0)
            waiting.update(dict.fromkeys(range(known + 1, drawn + 1), time.monotonic()))
            known = drawn
            wanted: dict[str, list[int]] = {}
            for ticket, since in list(waiting.items()):
                if self._store.check([f"ticket-{ticket}"]):
                    wanted.setdefault(self._store.get(f"ticket-{ticket}").decode(), []).append(ticket)
                    self._store.delete_key(f"ticket-{ticket}")
                elif time.monotonic() < since + _SIGN_UP_SECONDS:
                    continue
                del waiting[ticket]  # served now, or drawn by an engine that died before it could write on it
            for order, tickets in wanted.items():
                version, first, last = map(int, order.split())
                self._round(version, slice(first, last), tickets)

    def _round(self, version: int, wanted: slice, tickets: list[int]) -> None:
        with self._lock:
            buckets = self._versions.get(version)
        if buckets is None:
            for ticket in tickets:
                self._store.set(f"answer-{ticket}", "forgotten")
            return
        self._rounds += 1
        for rank, ticket in enumerate(tickets, start=1):
            self._store.set(f"answer-{ticket}", f"{self._rounds} {rank} {len(tickets) + 1}")
        try:
            group = _group(self._store, self._rounds, 0, len(tickets) + 1, self._host, self._device, self._timeout)
            flying: list[dist.Work] = []
            for bucket in buckets[wanted]:
                if len(flying) == _IN_FLIGHT:
                    flying.pop(0).wait(timedelta(seconds=self._timeout))
                flying.append(_broadcast(group, bucket))
            for work in flying:
                work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:  # a member has died: the others notice too, and ask again
            logger.warning("rank 0: broadcast of version %d to %d engines failed: %s", version, len(tickets), error)


class ProcessGroupInlet:
    """An engine's end.

    Args:
        device: where the buckets arrive.
    """

    name = "process_group"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stores: dict[tuple[str, int], dist.TCPStore] = {}

    def buckets(self, manifest: Manifest, wanted: range, offer: Any, deadline: Deadline) -> Iterator[Tensor]:
        if not wanted:
            return
        host, port = str(offer[0]), int(offer[1])
        store = self._store(host, port, deadline)
        place = f"from {host}:{port}"
        try:
            number, rank, size = self._sign_up(store, manifest.version, wanted, deadline)
            group = _group(store, number, rank, size, host, self._device, deadline.left)
        except (dist.DistError, RuntimeError) as error:
            self._stores.pop((host, port), None)
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"{place}: no round of the process group ({error})") from error
        flying: list[tuple[int, Tensor, dist.Work]] = []
        sizes = [manifest.buckets[index] for index in wanted]
        memory = [torch.empty(max(sizes), dtype=torch.uint8, device=self._device) for _ in range(_IN_FLIGHT)]
        started = 0
        for index in range(len(sizes)):
            try:
                # A bucket's memory is free for the next one but one when the caller has come back for the next.
                while started < min(len(sizes), index + _IN_FLIGHT):
                    bucket = memory[started % _IN_FLIGHT][: sizes[started]]
                    flying.append((started, bucket, _broadcast(group, bucket)))
                    started += 1
                arrived, bucket, work = flying.pop(0)
                work.wait(timedelta(seconds=max(0.001, deadline.left)))
            except RuntimeError as error:
                raise TransferError(
                    f"{place}: rank {rank} of {size}: its broadcast failed or took more than {deadline.seconds:g} s; "
                    f"the trainer or another engine of the round is dead ({error})"
                ) from error
            assert arrived == index
            yield bucket

    def close(self) -> None:
        self._stores.clear()

    def _store(self, host: str, port: int, deadline: Deadline) -> dist.TCPStore:
        if (host, port) not in self._stores:
            try:
                self._stores[host, port] = dist.TCPStore(
                    host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=deadline.left)
                )
            except (dist.DistError, RuntimeError) as error:
                raise TransferError(f"the trainer's store at {host}:{port} cannot be reached ({error})") from error
        return self._stores[host, port]

    def _sign_up(self, store: dist.TCPStore, version: int, wanted: range, deadline: Deadline) -> tuple[int, int, int]:
        """The round's number, this engine's rank in it, and its size."""
        ticket = store.add("tickets", 1)
        store.set(f"ticket-{ticket}", f"{version} {wanted.start} {wanted.stop}")
        while not store.check([f"answer-{ticket}"]):
            deadline.check(f"version {version}: waiting for a round of the process group")
            time.sleep(_POLL_SECONDS)
        answer = store.get(f"answer-{ticket}").decode()
        store.delete_key(f"answer-{ticket}")
        if answer == "forgotten":
            raise TransferError(f"version {version} is forgotten: a newer one is on its way")
        number, rank, size = answer.split()
        return int(number), int(rank), int(size)


def _group(
    store: dist.Store, number: int, rank: int, size: int, host: str, device: torch.device, timeout: float
) -> Any:
    """A process group of one round, beside whatever group this process has."""
    rounds = dist.PrefixStore(f"round-{number}", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        return dist.ProcessGroupNCCL(rounds, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    local = host in ("127.0.0.1", "localhost", "::1")
    make = dist.ProcessGroupGloo.create_device
    options._devices = [make(hostname="127.0.0.1") if local else dist.ProcessGroupGloo.create_default_device()]
    options._timeout = timedelta(seconds=max(0.001, timeout))
    return dist.ProcessGroupGloo(rounds, rank, size, options)


def _broadcast(group: Any, bucket: Tensor) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([bucket], options)

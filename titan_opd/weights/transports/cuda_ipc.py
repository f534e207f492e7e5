"""Between processes that share a GPU: handles of the trainer's memory, which the engine opens.

Not run without a CUDA device: its test is marked `gpu`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_opd.weights.errors import TransferError
from titan_opd.weights.manifest import Manifest
from titan_opd.weights.transports.base import Deadline


class CudaIpcOutlet:
    """Keeps the buckets on the trainer's GPU.

    Args:
        device: the GPU, which the engines see too.
    """

    name = "cuda_ipc"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._versions: dict[int, list[Tensor]] = {}

    def allocate(self, version: int, index: int, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def offer(self, version: int, buckets: Sequence[Tensor]) -> Any:
        self._versions[version] = list(buckets)
        torch.cuda.synchronize(self._device)  # the other process's stream knows nothing of this one's
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        return {"gpu": uuid, "handles": [_written(one.untyped_storage()._share_cuda_()) for one in buckets]}

    def forget(self, version: int) -> None:
        self._versions.pop(version, None)

    def close(self) -> None:
        self._versions.clear()


class CudaIpcInlet:
    """Opens the buckets of an outlet on the same GPU.

    Args:
        device: the engine's.
    """

    name = "cuda_ipc"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buckets(self, manifest: Manifest, wanted: range, offer: Any, deadline: Deadline) -> Iterator[Tensor]:
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        if uuid != offer["gpu"]:
            raise TransferError(
                f"it lies on GPU {offer['gpu']}, this engine runs on {uuid}; set weights.transport = 'process_group'"
            )
        for index in wanted:
            num_bytes, handle = manifest.buckets[index], offer["handles"][index]
            deadline.check("opening memory of the GPU")
            _, *rest = _read(handle)
            storage = torch.UntypedStorage._new_shared_cuda(self._device.index, *rest)
            yield torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)[:num_bytes]
            torch.cuda.synchronize(self._device)  # what was read is read before the memory is let go

    def close(self) -> None:
        """Nothing is kept."""


def _written(handle: Sequence[Any]) -> list[Any]:
    return [{"bytes": base64.b64encode(x).decode()} if isinstance(x, bytes) else x for x in handle]


def _read(handle: Sequence[Any]) -> list[Any]:
    return [base64.b64decode(x["bytes"]) if isinstance(x, dict) else x for x in handle]

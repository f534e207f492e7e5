"""Between processes of one machine, on the CPU: files in memory that the engine maps. The bytes are written once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_opd.errors import StorageError
from titan_opd.weights.errors import TransferError
from titan_opd.weights.manifest import Manifest
from titan_opd.weights.transports.base import Deadline

MEMORY = Path("/dev/shm")  # Linux's file system in memory


def machine_id() -> str:
    """Equal in all processes of one boot of one machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class SharedMemoryOutlet:
    """Keeps each bucket in a file of its own.

    Args:
        folder: in a file system in memory; this outlet's alone. What a killed trainer left in it is deleted.
    """

    name = "shared_memory"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)

    def allocate(self, version: int, index: int, num_bytes: int) -> Tensor:
        """A new file's memory.

        Raises:
            StorageError: there is no room. (Without this check the first write to the memory would end the process.)
        """
        path = bucket_file(self._folder, version, index)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            path.unlink()
            raise StorageError(
                f"no room for {num_bytes} bytes of weights in {self._folder} ({error}); two versions lie there at a "
                "time: enlarge it (a container's --shm-size), or set weights.transport = 'channel'"
            ) from error
        finally:
            os.close(descriptor)
        return _mapped(path, num_bytes)

    def offer(self, version: int, buckets: Sequence[Tensor]) -> Any:
        return str(self._folder)

    def forget(self, version: int) -> None:
        """Delete the files; who has them mapped keeps their memory until it lets go."""
        for path in self._folder.glob(f"{version}-*"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class SharedMemoryInlet:
    """Maps the files of an outlet on this machine."""

    name = "shared_memory"

    def can_read(self, manifest: Manifest, offer: Any) -> bool:
        """Whether the files can be seen from here."""
        return manifest.machine == machine_id() and bucket_file(Path(offer), manifest.version, 0).exists()

    def buckets(self, manifest: Manifest, wanted: range, offer: Any, deadline: Deadline) -> Iterator[Tensor]:
        for index in wanted:
            num_bytes = manifest.buckets[index]
            path = bucket_file(Path(offer), manifest.version, index)
            try:
                size = path.stat().st_size
                if size != num_bytes:
                    raise TransferError(f"{path} has {size} bytes, {num_bytes} were meant")
                bucket = _mapped(path, num_bytes)
            except (OSError, RuntimeError) as error:
                if isinstance(error, TransferError):
                    raise
                raise TransferError(
                    f"{path} cannot be mapped ({error}): the version is forgotten, or the trainer has ended, or it is "
                    "on another machine (weights.transport = 'channel' reaches that)"
                ) from error
            yield bucket

    def close(self) -> None:
        """Nothing is kept."""


def bucket_file(folder: Path, version: int, index: int) -> Path:
    """Where a bucket lies."""
    return folder / f"{version}-{index}"


def _mapped(path: Path, num_bytes: int) -> Tensor:
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=num_bytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)

"""What changed in a whole version since the one before, laid out beside it.

unchanged   a tensor in which no bit changed: nothing travels
sparse      at most a fifth of its elements changed: positions and new bits (`delta.py`)
whole       more: its bytes as they are
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from titan_opd.weights.delta import ChangedElements, compare
from titan_opd.weights.manifest import Delta, DeltaEntry, place_end_to_end
from titan_opd.weights.verify import digest

MOST_CHANGED = 0.2  # of a tensor's elements; above it scattering takes longer than copying the tensor
MOST_BYTES = 0.5  # of the whole version's; a delta that saves less is not worth its memory


def digest_of_version(digests: Mapping[str, int]) -> int:
    """One number that tells a version's bytes from those of any other, from the digests of its tensors."""
    return digest(torch.tensor(list(digests.values()), dtype=torch.int64))


class VersionDelta:
    """The difference between two versions, tensor by tensor.

    It holds the changed elements until they are written: at most `MOST_CHANGED` of all, with their positions.

    Args:
        old, new: the versions' tensors by name, the same names in the same order.
    """

    def __init__(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
        self._new = new
        self._changed: dict[str, int] = {}
        self._elements: dict[str, ChangedElements] = {}
        for name, tensor in new.items():
            num_changed, elements = compare(old[name], tensor, most=int(MOST_CHANGED * tensor.numel()))
            if num_changed:
                self._changed[name] = num_changed
            if elements is not None:
                self._elements[name] = elements

    @property
    def num_bytes(self) -> int:
        """That have to travel."""
        return sum(self._num_bytes(name) for name in self._changed)

    @property
    def is_worthwhile(self) -> bool:
        """Whether it is so much smaller than the version that it is published."""
        return self.num_bytes <= MOST_BYTES * sum(tensor.nbytes for tensor in self._new.values())

    def metrics(self) -> dict[str, float]:
        """Shares of all elements and of the version's bytes, and how many tensors are of each kind."""
        return {
            "weights/changed_share": sum(self._changed.values()) / sum(one.numel() for one in self._new.values()),
            "weights/delta_share": self.num_bytes / sum(one.nbytes for one in self._new.values()),
            "weights/tensors_unchanged": len(self._new) - len(self._changed),
            "weights/tensors_sparse": len(self._elements),
            "weights/tensors_whole": len(self._changed) - len(self._elements),
        }

    def lay_out(
        self, base: int, base_digests: Mapping[str, int], *, first_bucket: int, bucket_bytes: int
    ) -> tuple[Delta, list[int]]:
        """Where everything goes, and the sizes of the buckets for it.

        Args:
            base: the old version's number.
            base_digests: of its tensors.
            first_bucket: the number of the first of these buckets among all of the version.
            bucket_bytes: of a bucket; a larger tensor has one of its own.
        """
        places, sizes = place_end_to_end([self._num_bytes(name) for name in self._changed], bucket_bytes)
        entries = [
            DeltaEntry(name, self._changed[name], name not in self._elements, first_bucket + bucket, begin)
            for name, (bucket, begin) in zip(self._changed, places, strict=True)
        ]
        return Delta(base, digest_of_version(base_digests), first_bucket, entries), sizes

    def write(self, delta: Delta, buckets: Sequence[Tensor]) -> None:
        """Put all of it into the version's buckets, once: what is written is held no longer."""
        for entry in delta.tensors:
            memory = buckets[entry.bucket][entry.begin : entry.begin + self._num_bytes(entry.name)]
            if entry.is_whole:
                memory.copy_(self._new[entry.name].view(-1).view(torch.uint8))
            else:
                self._elements.pop(entry.name).write(memory)

    def _num_bytes(self, name: str) -> int:
        elements = self._elements.get(name)
        return self._new[name].nbytes if elements is None else elements.num_bytes

"""The trainer's processes that share one vLLM engine between them, and what they tell each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from titan_opd.data.records import Sample
from titan_opd.weights.errors import VerificationError


@dataclass(frozen=True)
class EngineMembers:
    """One engine's processes, by rank.

    Attributes:
        ranks: of the trainer's processes.
        group: of these ranks; None where there is one.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    def pool(self, samples: Sequence[Sample]) -> list[Sample]:
        """What all members are asked, each sample once, in the same order at all of them.

        Members that train on the same share of the batch (`parallel.tp`) bring the same samples, others their own.
        """
        pooled: list[Sample] = []
        known: set[int] = set()
        for share in self._gather(list(samples)):
            pooled += [sample for sample in share if sample.number not in known]
            known |= {sample.number for sample in share}
        return pooled

    def agreed_digests(self, digests: Mapping[str, int]) -> Mapping[str, int]:
        """The digests of the weights as each member received them whole.

        Raises:
            VerificationError: at every member, when one has received other bytes than the first.
        """
        first, *others = self._gather(dict(digests))
        for rank, other in zip(self.ranks[1:], others, strict=True):
            wrong = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
            if wrong:
                raise VerificationError(
                    f"{len(wrong)} tensors, {wrong[0]!r} among them, came to rank {rank} with other bytes than to rank "
                    f"{self.ranks[0]}, and one engine lives in both"
                )
        return digests

    def _gather(self, value: Any) -> list[Any]:
        if self.group is None:
            return [value]
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self.group)
        return values


def join_members(num_members: int) -> EngineMembers:
    """The engine that this process belongs to; all processes of the trainer call it together.

    The processes are divided as vLLM divides them: the first `num_members` ranks have the first engine, and so on.

    Args:
        num_members: of each engine, `rollout.vllm.tensor_parallel_size`.

    Raises:
        ValueError: it does not divide the number of processes.
    """
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if size % num_members:
        raise ValueError(
            f"rollout.vllm.tensor_parallel_size = {num_members} does not divide the trainer's {size} processes, which "
            "the engines live in; choose a divisor, start a multiple of it (torchrun --nproc-per-node), or set "
            "rollout.placement = 'workers'"
        )
    if num_members == 1:
        return EngineMembers((rank,), None)
    mine = EngineMembers((), None)
    for first in range(0, size, num_members):  # every process takes part in making every group
        ranks = tuple(range(first, first + num_members))
        group = dist.new_group(list(ranks), backend="gloo")
        if rank in ranks:
            mine = EngineMembers(ranks, group)
    return mine

"""What crosses the processes, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {  # torch's operators by what they do
    "all_gather": ("_allgather_base_", "allgather_", "all_gather_into_tensor", "allgather_into_tensor_coalesced_"),
    "reduce_scatter": ("_reduce_scatter_base_", "reduce_scatter_tensor", "reduce_scatter_"),
    "all_reduce": ("allreduce_", "all_reduce", "all_reduce_"),
}
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names}


class CountCommunication(TorchDispatchMode):
    """Collectives within the block, of this process.

    Attributes:
        calls: by kind.
        num_bytes: by kind, of the whole tensor: what a gather makes, what a reduction reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its shards comes here again
        result = function(*args, **kwargs or {})
        if function.namespace in ("c10d", "_c10d_functional"):
            name = function._overloadpacket.__name__
            if name in _KIND_OF:
                tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
                self.calls[_KIND_OF[name]] += 1
                self.num_bytes[_KIND_OF[name]] += max(x.numel() * x.element_size() for x in tensors)
        return result

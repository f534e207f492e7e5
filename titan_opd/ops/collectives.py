"""Collectives of torch.distributed that have another name in other releases."""

from __future__ import annotations

import torch.distributed as dist

# torch 2.13 calls it so, and warns of the name that 2.11 has.
all_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor

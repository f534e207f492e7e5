"""Python face of the compiled operators in csrc/, each with its plain PyTorch reference beside it.

`gather_stats` and `topk_logprobs` read each row of logits once; `gumbel_sample` draws from rows; `sparse_softmax_grad_`
replaces logits by their gradient; `dense_pair_sums` and `dense_pair_grad_` compare two sides' rows. `reference` and
`*_reference` have what they must equal; `describe` says which code serves on this machine. Importing this package needs
the compiled extension. In plain PyTorch: `noise`, counter-based uniforms, and `draw`, what they draw from rows.
"""

from __future__ import annotations

from titan_opd.ops.dense_pair import DensePairSums, dense_pair_grad_, dense_pair_sums
from titan_opd.ops.digests import multi_copy_digests, multi_digest
from titan_opd.ops.extension import describe
from titan_opd.ops.gather_stats import gather_stats
from titan_opd.ops.gumbel_sample import RaceWinners, gumbel_sample
from titan_opd.ops.multi_copy import multi_copy
from titan_opd.ops.row_stats import RowStats, TopK
from titan_opd.ops.sparse_softmax_grad import sparse_softmax_grad_
from titan_opd.ops.topk_logprobs import topk_logprobs

__all__ = [
    "DensePairSums",
    "RaceWinners",
    "RowStats",
    "TopK",
    "dense_pair_grad_",
    "dense_pair_sums",
    "describe",
    "gather_stats",
    "gumbel_sample",
    "multi_copy",
    "multi_copy_digests",
    "multi_digest",
    "sparse_softmax_grad_",
    "topk_logprobs",
]

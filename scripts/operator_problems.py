"""Inputs for every operator of csrc, of any size, and what a call of it reads and writes: for profiles and GPU checks.

A problem is called through the operator's public face in titan_opd.ops. The faces serve float64 by the plain PyTorch
references, so the same call on float64 copies of the inputs is what the kernels are held to.

Shape suffixes: R rows, V columns of the vocabulary, K ids a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from titan_opd import ops

SCHEMAS = Path(__file__).resolve().parents[1] / "csrc" / "schemas.h"


@dataclass(frozen=True)
class Sizes:
    """How large a problem is: rows, columns, ids a row, and the logits' dtype."""

    num_rows: int
    vocab: int
    num_ids: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"[{self.num_rows} x {self.vocab}] {str(self.dtype).removeprefix('torch.')}, {self.num_ids} ids"


Inputs = dict[str, Any]
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """One operator.

    Attributes:
        operator: its name in torch.ops.titan_opd.
        make: inputs of some size on a device; random, but a function of the generator.
        call: the operator on such inputs, which an in-place operator changes; its results by name.
        unread: the argument that it writes without reading it, if there is one.
    """

    operator: str
    make: Callable[[Sizes, torch.Generator], Inputs]
    call: Callable[[Inputs], Outputs]
    unread: str | None = None

    def inputs(self, sizes: Sizes, device: torch.device, seed: int = 0) -> Inputs:
        """Made on the device itself: at full size a matrix of logits takes minutes to come from the CPU."""
        return self.make(sizes, torch.Generator(device).manual_seed(seed))


def _logits(sizes: Sizes, generator: torch.Generator) -> Tensor:
    """Peaked rows, as a language model's are; made a block of rows at a time, without a float32 copy of the whole."""
    logits_RV = torch.empty(sizes.num_rows, sizes.vocab, dtype=sizes.dtype, device=generator.device)
    for block in logits_RV.split(512):
        block.copy_(torch.randn(block.shape, generator=generator, device=generator.device) * 4)
    return logits_RV


def _ids(sizes: Sizes, generator: torch.Generator) -> Tensor:
    """Ids of the whole vocabulary, some of them padding, seldom twice in a row."""
    return torch.randint(-1, sizes.vocab, (sizes.num_rows, sizes.num_ids), generator=generator, device=generator.device)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _temperatures(sizes: Sizes, generator: torch.Generator) -> Tensor:
    return 0.5 + torch.rand(sizes.num_rows, generator=generator, device=generator.device)


def _no_ids(logits_RV: Tensor) -> Tensor:
    return torch.empty(len(logits_RV), 0, dtype=torch.int64, device=logits_RV.device)


def _make_gather_stats(sizes: Sizes, generator: torch.Generator) -> Inputs:
    return {
        "logits_RV": _logits(sizes, generator),
        "ids_RK": _ids(sizes, generator),
        "inverse_temperature": _temperatures(sizes, generator),
    }


def _call_gather_stats(inputs: Inputs) -> Outputs:
    stats = ops.gather_stats(**inputs)
    return {"lse": stats.lse, "tail lse": stats.tail_lse, "candidates": stats.candidates}


def _make_sparse_softmax_grad(sizes: Sizes, generator: torch.Generator) -> Inputs:
    inputs = _make_gather_stats(sizes, generator)
    stats = ops.gather_stats(**inputs)
    partials = {
        "g_RK": _normal(generator, sizes.num_rows, sizes.num_ids),
        "g_lse_R": _normal(generator, sizes.num_rows),
        "g_tail_R": _normal(generator, sizes.num_rows),
    }
    return {**inputs, **partials, "lse_R": stats.lse, "tail_lse_R": stats.tail_lse}


def _call_sparse_softmax_grad(inputs: Inputs) -> Outputs:
    return {"gradient": ops.sparse_softmax_grad_(**inputs)}


def _make_topk_logprobs(sizes: Sizes, generator: torch.Generator) -> Inputs:
    return {"logits_RV": _logits(sizes, generator), "k": min(sizes.num_ids, sizes.vocab)}


def _call_topk_logprobs(inputs: Inputs) -> Outputs:
    top = ops.topk_logprobs(**inputs)
    return {"ids": top.ids, "logprobs": top.logprobs, "tail logprob": top.tail_logprob}


def _make_gumbel_sample(sizes: Sizes, generator: torch.Generator) -> Inputs:
    keys_R = torch.randint(-(2**62), 2**62, (sizes.num_rows,), generator=generator, device=generator.device)
    # Four draws share one read of a row on a GPU; the reference holds [R, m, V].
    return {"logits_RV": _logits(sizes, generator), "keys_R": keys_R, "num_samples": min(sizes.num_ids, 4)}


def _call_gumbel_sample(inputs: Inputs) -> Outputs:
    return ops.gumbel_sample(**inputs)._asdict()


def _make_pair(sizes: Sizes, generator: torch.Generator) -> Inputs:
    student_RV, teacher_RV = _logits(sizes, generator), _logits(sizes, generator)
    return {
        "student_RV": student_RV,
        "teacher_RV": teacher_RV,
        "student_stats": ops.gather_stats(student_RV, _no_ids(student_RV)),
        "teacher_stats": ops.gather_stats(teacher_RV, _no_ids(teacher_RV)),
        "beta": 0.3,
        "min_logprob": -30.0,
    }


def _call_dense_pair_sums(inputs: Inputs) -> Outputs:
    return ops.dense_pair_sums(**inputs)._asdict()


def _make_dense_pair_grad(sizes: Sizes, generator: torch.Generator) -> Inputs:
    pair = _make_pair(sizes, generator)
    weights = {"forward_weight": 0.6, "reverse_weight": -0.3, "jsd_weight": 1.2}
    coefficients_R = _normal(generator, sizes.num_rows)
    return {**pair, "sums": ops.dense_pair_sums(**pair), "coefficients_R": coefficients_R, **weights}


def _call_dense_pair_grad(inputs: Inputs) -> Outputs:
    return {"gradient": ops.dense_pair_grad_(**inputs)}


def _make_multi_copy(sizes: Sizes, generator: torch.Generator) -> Inputs:
    """As many uneven parts of a float32 vector as there are ids, into tensors of the dtype: weights being cast."""
    total = sizes.num_rows * sizes.vocab
    borders = torch.randint(0, total + 1, (sizes.num_ids - 1,), generator=generator, device=generator.device)
    lengths = torch.diff(torch.tensor([0, *sorted(borders.tolist()), total])).tolist()
    sources = [_normal(generator, length) for length in lengths]
    return {"sources": sources, "destinations": [torch.empty_like(one, dtype=sizes.dtype) for one in sources]}


def _call_multi_copy(inputs: Inputs) -> Outputs:
    ops.multi_copy(**inputs)
    return {"destinations": torch.cat(inputs["destinations"])}


PROBLEMS = {
    problem.operator: problem
    for problem in (
        Problem("gather_stats", _make_gather_stats, _call_gather_stats),
        Problem("sparse_softmax_grad_", _make_sparse_softmax_grad, _call_sparse_softmax_grad),
        Problem("topk_logprobs", _make_topk_logprobs, _call_topk_logprobs),
        Problem("gumbel_sample", _make_gumbel_sample, _call_gumbel_sample),
        Problem("dense_pair_sums", _make_pair, _call_dense_pair_sums),
        Problem("dense_pair_grad_", _make_dense_pair_grad, _call_dense_pair_grad),
        Problem("multi_copy", _make_multi_copy, _call_multi_copy, unread="destinations"),
    )
}


def tensor_operators() -> list[str]:
    """The operators of csrc/schemas.h that take tensors."""
    definitions = re.findall(r'library\.def\(((?:\s*"[^"]*")+)\s*\)', SCHEMAS.read_text())
    joined = ["".join(re.findall(r'"([^"]*)"', one)) for one in definitions]
    return [one.partition("(")[0] for one in joined if "Tensor" in one.partition("->")[0]]


def copied(inputs: Inputs) -> Inputs:
    """Inputs that an in-place operator may change."""
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, inputs)


def in_float64(inputs: Inputs) -> Inputs:
    """The same numbers as float64 on the CPU, for the references."""

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.cpu().double() if value.is_floating_point() else value.cpu().clone()

    return tree_map(convert, inputs)


class _Traffic(TorchDispatchMode):
    """Notes what the compiled operator itself reads and writes, whatever its face does beside it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.operator = f"titan_opd::{problem.operator}"
        self.unread = problem.unread
        self.num_bytes = 0
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name == self.operator:
            self.num_calls += 1
            for value, argument in zip(args, func._schema.arguments, strict=False):
                changes = argument.alias_info is not None and argument.alias_info.is_write
                self.num_bytes += _bytes(value) * (2 if changes and argument.name != self.unread else 1)
            self.num_bytes += _bytes(result)
        return result


def _bytes(values: Any) -> int:
    return sum(value.numel() * value.element_size() for value in tree_leaves(values) if isinstance(value, Tensor))


def traffic(problem: Problem, inputs: Inputs) -> int:
    """Bytes that one call must move: each tensor that it reads, writes or returns once, one that it changes twice.

    Raises:
        RuntimeError: the call did not come to the compiled operator exactly once.
    """
    with _Traffic(problem) as mode:
        problem.call(copied(inputs))
    if mode.num_calls != 1:
        raise RuntimeError(f"{problem.operator} was called {mode.num_calls} times, not once")
    return mode.num_bytes


def relative_errors(actual: Outputs, expected: Outputs) -> Iterator[tuple[str, Tensor, float]]:
    """Each output's name, itself and its largest error over the largest expected number; integers: the share that
    differs. Infinities must agree; NaN or a missing infinity is an infinite error."""
    for name, value in actual.items():
        wanted = expected[name]
        value = value.cpu()
        if not value.is_floating_point():
            yield name, value, (value != wanted).double().mean().item() if value.numel() else 0.0
            continue
        value, wanted = value.double(), wanted.double()
        same = value == wanted
        difference = torch.where(same, 0.0, (value - wanted).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        scale = torch.where(wanted.isfinite(), wanted.abs(), 0.0)
        largest = scale.max().clamp(min=1e-30) if scale.numel() else torch.tensor(1.0)
        yield name, actual[name], (difference.max() / largest).item() if difference.numel() else 0.0

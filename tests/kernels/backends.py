"""The codes that implement an operator here: each must pass the same tests.

CPU kernels of every instruction set that this machine has, the CUDA kernels in emulation under several orders of a
block's threads (a missing barrier shows in one order and hides in another), and on a GPU the CUDA kernels themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import titan_opd._EMU  # noqa: F401  registers torch.ops.titan_opd_emu
import torch
from torch import Tensor

from titan_opd import ops  # noqa: F401  registers torch.ops.titan_opd

# From the narrowest to the widest: a machine that has one has all before it.
ISAS = ("portable", "avx2", "avx512")
BEST_ISA = ISAS.index(torch.ops.titan_opd.cpu_isa())
THREAD_ORDERS = (0, 1, 2)  # warps ascending, descending, threads shuffled


@dataclass(frozen=True)
class Backend:
    """One code, and how to call its operators."""

    name: str

    def call(self, operator: str, *arguments: Any, **options: Any) -> Any:
        """The operator `titan_opd::<operator>` on CPU tensors; in-place operators change the tensors given."""
        if self.name in ISAS:
            return getattr(torch.ops.titan_opd, operator)(*arguments, **options, isa=self.name)
        if self.name == "cuda":
            return _call_on_gpu(getattr(torch.ops.titan_opd, operator), arguments, options)
        torch.ops.titan_opd_emu.set_thread_order(int(self.name.removeprefix("emulated")))
        return getattr(torch.ops.titan_opd_emu, operator)(*arguments, **options)


def _call_on_gpu(operator: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    def copy(value: Any) -> Any:
        if isinstance(value, list):
            return [copy(one) for one in value]
        return _strided_copy(value) if isinstance(value, Tensor) else value

    def write_back(value: Any, moved: Any) -> None:
        if isinstance(value, list):
            for one, moved_one in zip(value, moved, strict=True):
                write_back(one, moved_one)
        elif isinstance(value, Tensor):
            value.copy_(moved)

    on_gpu = [copy(value) for value in arguments]
    options_on_gpu = {name: copy(value) for name, value in options.items()}
    result = operator(*on_gpu, **options_on_gpu)
    for value, moved in zip([*arguments, *options.values()], [*on_gpu, *options_on_gpu.values()], strict=True):
        write_back(value, moved)
    if isinstance(result, (tuple, list)):
        return tuple(one.cpu() for one in result)
    return result.cpu() if isinstance(result, Tensor) else result


def _strided_copy(tensor: Tensor) -> Tensor:
    """On the GPU with the same strides, for kernels must cope with any."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
    return moved.copy_(tensor)


def _parameters() -> list[Any]:
    parameters = [
        pytest.param(Backend(isa), id=isa, marks=pytest.mark.skipif(i > BEST_ISA, reason=f"this machine has no {isa}"))
        for i, isa in enumerate(ISAS)
    ]
    parameters += [pytest.param(Backend(f"emulated{order}"), id=f"emulated{order}") for order in THREAD_ORDERS]
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    parameters.append(pytest.param(Backend("cuda"), id="cuda", marks=[pytest.mark.gpu, no_gpu]))
    return parameters


per_backend = pytest.mark.parametrize("backend", _parameters())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

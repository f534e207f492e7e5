"""Loads the compiled extensions and says which of their kernels serve here."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from titan_opd.errors import NotBuiltError
from titan_opd.ops.arguments import LOGIT_DTYPES

BUILD_COMMAND = "pip install --no-build-isolation --use-pep517 -e ."
ISA_TITLES = {"portable": "portable C++", "avx2": "AVX2", "avx512": "AVX-512"}


def load() -> None:
    """Import `titan_opd._C`, and `_CUDA` beside a torch for CUDA: they register `torch.ops.titan_opd`.

    Raises:
        NotBuiltError: an extension is not built, or does not fit this torch; the text has the command that builds it.
    """
    modules = ["titan_opd._C"]
    if torch.version.cuda is not None:
        modules.append("titan_opd._CUDA")
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise NotBuiltError(
                f"titan_opd's compiled operators ({module}) do not load ({error}). In the repository's root run: "
                f"{BUILD_COMMAND}"
            ) from error


load()


def has_kernel(tensor: Tensor) -> bool:
    """Whether the compiled operators work on this tensor; the references serve every other dtype and device."""
    return tensor.dtype in LOGIT_DTYPES and tensor.device.type in ("cpu", "cuda")


def describe(device: torch.device) -> str:
    """Which code serves the operators on this device, for logs: `"operators: CPU kernels (AVX-512)"`."""
    if device.type == "cuda":
        return "operators: CUDA kernels"
    if device.type == "cpu":
        return f"operators: CPU kernels ({ISA_TITLES[torch.ops.titan_opd.cpu_isa()]})"
    return "operators: PyTorch references"

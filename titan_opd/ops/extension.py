"""Loads the compiled extension and says which of its kernels serve here."""

from __future__ import annotations

import torch

BUILD_COMMAND = "pip install --no-build-isolation --use-pep517 -e ."
ISA_TITLES = {"portable": "portable C++", "avx2": "AVX2", "avx512": "AVX-512"}


def load() -> None:
    """Import `titan_opd._C`, which registers the operators under `torch.ops.titan_opd`.

    Raises:
        ImportError: the extension is not built, or does not fit this torch; the message has the command that builds it.
    """
    try:
        import titan_opd._C  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"titan_opd's compiled operators do not load ({error}). In the repository's root run: {BUILD_COMMAND}"
        ) from error


load()


def describe() -> str:
    """Which code serves each operator on this machine, for logs: `"gather_stats: CPU kernel (AVX-512)"`."""
    return f"gather_stats: CPU kernel ({ISA_TITLES[torch.ops.titan_opd.cpu_isa()]})"

"""Finding torchao, an extra: nothing of it is imported before an option asks for it."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

_VERSION = "0.18"  # whose interfaces this code was written for and tested with


def import_torchao(module: str, option: str) -> ModuleType:
    """A module of torchao.

    Args:
        module: its name, such as "torchao.float8".
        option: what asks for it, with its value, for the error.

    Raises:
        ValueError: torchao is not installed.
    """
    # It warns of kernels in its package that were built for other machines; none of them is used here.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{option} needs torchao {_VERSION}, which cannot be imported ({error}): pip install 'titan_opd[float8]', "
            "or leave the option out"
        ) from error

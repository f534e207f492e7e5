"""Products of the student's layers in 8-bit floating point while it trains (torchao).

Each of the three products of a linear layer (output, gradient of the input, gradient of the weight) rounds both of its
operands to float8, scaled so that the largest value of an operand (tensorwise), or of each of the rows and columns that
are multiplied with each other (rowwise), comes near float8's own largest. Parameters stay what they are: whatever finds
them by name (FSDP, the optimizer, checkpoints, the engines) sees no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import RowwiseParallel

from titan_opd.config.float8 import Float8Config
from titan_opd.models import Decoder
from titan_opd.parallel.tensor_parallel import plan
from titan_opd.torchao_setup import import_torchao

MULTIPLE = 16  # of both dimensions of a matrix that float8's kernels multiply with
_OLDEST_DEVICE = (8, 9)  # compute capability of the first NVIDIA GPUs with float8 (Ada; Hopper is 9.0)


def apply_float8(decoder: Decoder, config: Float8Config, *, tp: int, device_type: str) -> None:
    """Let the linear layers of `decoder`, in place, multiply in float8 where they can.

    The embedding and the output projection are never among them: the loss needs their full precision. Every module
    keeps its parameters.

    Args:
        decoder: not cut by tensor parallelism yet.
        config: a recipe other than "none".
        tp: processes that will cut it.
        device_type: where it will compute.

    Raises:
        ValueError: torchao is missing, the device has no float8, or no layer can use it.
    """
    option = f"training.float8.recipe = {config.recipe!r}"
    float8 = import_torchao("torchao.float8", option)
    if not config.emulate:
        _check_device(device_type, option)
    reasons = reasons_against(decoder, tp)
    if all(reasons.values()):
        raise ValueError(
            f"{option}: no linear layer of the student can use it; {_list_reasons(reasons)}. Choose another "
            "parallel.tp or another student, or leave it out"
        )
    recipe = replace(
        float8.Float8LinearConfig.from_recipe_name(config.recipe),
        emulate=config.emulate,
        # The gradient of a weight sums over tokens, whose number is no multiple of 16: zeros are added.
        pad_inner_dim=True,
        # A scale that is a power of two changes no digit of a number: how tokens are shared among micro-batches and
        # processes, on which the largest value depends, does not show in the rounding.
        round_scales_to_power_of_2=True,
    )
    for layer in decoder.model.layers:
        float8.convert_to_float8_training(layer, config=recipe, module_filter_fn=lambda _, name: not reasons[name])


def reasons_against(decoder: Decoder, tp: int) -> dict[str, str]:
    """Why a linear layer cannot multiply in float8, empty where it can, by its name in each layer of the decoder."""
    styles = plan(decoder.config, sequence_parallel=False)
    reasons = {}
    for name, linear in _linears(decoder.model.layers[0]):
        sizes = {"inputs": linear.in_features, "outputs": linear.out_features}
        cut = "inputs" if isinstance(styles[f"model.layers.*.{name}"], RowwiseParallel) else "outputs"
        sizes[cut] //= tp
        where = " on a process" if tp > 1 else ""
        odd = [f"{size} {what}{where}" for what, size in sizes.items() if size % MULTIPLE]
        reasons[name] = f"{' and '.join(odd)}, no multiple of {MULTIPLE}" if odd else ""
    return reasons


def describe_float8(decoder: Decoder, config: Float8Config, *, tp: int) -> list[str]:
    """A line that says which linear layers multiply in float8, which do not and why; none where none was to."""
    if config.recipe == "none":
        return []
    reasons = reasons_against(decoder, tp)
    used = ", ".join(name for name, reason in reasons.items() if not reason)
    others = f"; not {_list_reasons(reasons)}" if any(reasons.values()) else ""
    how = "emulated" if config.emulate else "torchao"
    return [f"float8 ({config.recipe}, {how}): {used} of each layer{others}; not embedding and output projection"]


@contextmanager
def plain_products(decoder: Decoder) -> Iterator[None]:
    """In the block, the layers of `decoder` multiply as if there were no float8."""
    changed = [
        linear
        for layer in decoder.model.layers
        for _, linear in _linears(layer)
        if type(linear).forward is not nn.Linear.forward
    ]
    for linear in changed:
        linear.forward = nn.Linear.forward.__get__(linear)
    try:
        yield
    finally:
        for linear in changed:
            del linear.forward


def _check_device(device_type: str, option: str) -> None:
    found = "the device is no GPU"
    if device_type == "cuda":
        capability = torch.cuda.get_device_capability()
        if capability >= _OLDEST_DEVICE:
            return
        found = f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}"
    raise ValueError(
        f"{option} needs a GPU of compute capability {_OLDEST_DEVICE[0]}.{_OLDEST_DEVICE[1]} or newer, and {found}; "
        "leave it out, or set training.float8.emulate = true to see what its rounding does"
    )


def _list_reasons(reasons: dict[str, str]) -> str:
    return ", ".join(f"{name} ({reason})" for name, reason in reasons.items() if reason)


def _linears(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in layer.named_modules() if isinstance(module, nn.Linear))

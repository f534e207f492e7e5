"""Rollout weights in 8 bits: one scale for each output row of a decoder block's linear layers.

Of a row w of such a layer, as it was cast to `rollout.dtype`, travel and are stored

    scale = max(max_j |w_j| / M, 2^-126)                         float32
    q_j   = w_j / scale, rounded to the nearest even, in [-M, M]  8 bits

with M = 127 for int8 and M = 448, the largest number, for float8 e4m3. Each operation is one correctly rounded float32
operation, so the bytes are the same on every device. The lower bound, float32's smallest normal number, makes a row of
zeros one of zeros and keeps subnormal scales, which some devices flush to zero, out of it. A row with a number that is
not finite has a scale that is not finite either.

The policy of a quantised engine is the model whose weights are q * scale in `rollout.dtype` (`dequantize_rows`).
Embedding, output projection, norms and biases stay as they were cast.

The definition is ours and not torchao's or vLLM's: these quantise while they load and say of no byte that it is the
same in another version or on another device, and here the trainer's bytes are compared with the engine's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from titan_opd.weights.pieces import WeightSpec

TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # of `rollout.quantization`
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_CHUNK_ELEMENTS = 1 << 20  # quantised at a time: bounds the float32 copies
_QUANTIZED = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.(\w+_proj)\.weight")
_SCALE = "_scale"


def is_quantized(name: str) -> bool:
    """Whether the parameter, by its Hugging Face name, is one that quantisation is of."""
    return _QUANTIZED.fullmatch(name) is not None


def scale_name(name: str) -> str:
    """What the scales of a quantised parameter go by."""
    return name + _SCALE


def is_scale(name: str) -> bool:
    """Whether it is the name of the scales of a quantised parameter."""
    return name.endswith(_SCALE) and is_quantized(name.removesuffix(_SCALE))


@torch.no_grad()
def quantize_rows(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise each row by itself, as the head of this module says.

    Args:
        weight: [rows, columns] as it was cast.
        dtype: int8 or float8_e4m3fn.

    Returns:
        [rows, columns] of `dtype`, and [rows] float32, the scales.
    """
    quantized = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    # As tensors: a GPU multiplies by the rounded inverse where it is asked to divide by a number of Python's.
    largest = torch.tensor(LARGEST[dtype], device=weight.device)
    num_rows = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
    for rows, places, scales in zip(*(one.split(num_rows) for one in (weight, quantized, scale)), strict=True):
        rows = rows.float()
        torch.div(rows.abs().amax(1), largest, out=scales).clamp_(min=_SMALLEST_SCALE)
        values = (rows / scales[:, None]).clamp_(-LARGEST[dtype], LARGEST[dtype])
        places.copy_(values if dtype.is_floating_point else values.round_())
    return quantized, scale


def quantized_tensors(name: str, weight: Tensor, dtype: torch.dtype) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
    """What a parameter travels and is stored as, by name: the weight in 8 bits, and its scales.

    Args:
        name: of the parameter.
        weight, dtype: of `quantize_rows`.
    """
    quantized, scale = quantize_rows(weight, dtype)
    return (name, quantized), (scale_name(name), scale)


@torch.no_grad()
def dequantize_rows(quantized: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, columns] q * scale, multiplied in float32 and rounded to `dtype`.

    Args:
        quantized: [rows, columns] int8 or float8_e4m3fn.
        scale: [rows] float32.
    """
    return _as_float32(quantized).mul_(scale[:, None]).to(dtype)


def _as_float32(quantized: Tensor) -> Tensor:
    """A copy. PyTorch takes float8 apart on a CPU number by number, in ten times the time of these shifts."""
    if not quantized.is_floating_point():
        return quantized.float()
    # Sign, exponent and fraction at a float16's places are 2^-8 of the number; NaN, which no quantised row has, is not.
    halves = (quantized.view(torch.int8).to(torch.int16) << 7) & ~0x4000
    return halves.view(torch.float16).float().mul_(256.0)


class Dequantizer:
    """Puts quantised weights and their scales, as they come one by one, together to what they stand for.

    Args:
        dtype: of that.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._halves: dict[str, Tensor] = {}

    def values(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """All tensors under the names of the parameters, those that are not quantised as they are.

        Args:
            named: some of the tensors; the other half of a weight may come with a later call.
        """
        for name, tensor in named:
            if not is_scale(name) and tensor.dtype not in LARGEST:
                yield name, tensor
                continue
            self._halves[name] = tensor
            weight = name.removesuffix(_SCALE)
            if {weight, scale_name(weight)} <= self._halves.keys():
                quantized, scale = self._halves.pop(weight), self._halves.pop(scale_name(weight))
                yield weight, dequantize_rows(quantized, scale, self._dtype)


def quantized_specs(specs: Mapping[str, WeightSpec], quantization: str) -> dict[str, WeightSpec]:
    """What travels and is stored instead of `specs`: each quantised weight is followed by its scales.

    Args:
        specs: of the weights as they are cast, by Hugging Face name.
        quantization: as `rollout.quantization`.
    """
    found: dict[str, WeightSpec] = {}
    for name, spec in specs.items():
        if quantization == "none" or not is_quantized(name):
            found[name] = spec
            continue
        found[name] = WeightSpec(spec.shape, TYPES[quantization])
        found[scale_name(name)] = WeightSpec(spec.shape[:1], torch.float32)
    return found


def describe_quantization(specs: Mapping[str, WeightSpec], dtype: torch.dtype) -> list[str]:
    """A line that says which layers are quantised to what, which are not and why, and what that saves.

    Args:
        specs: what is stored, by Hugging Face name.
        dtype: `rollout.dtype`, in which the rest is.

    Returns:
        No line where nothing is quantised.
    """
    weights = {name: spec for name, spec in specs.items() if spec.dtype in LARGEST}
    if not weights:
        return []
    matches = [_QUANTIZED.fullmatch(name) for name in weights]
    layers = list(dict.fromkeys(f"{match[1]}.{match[2]}" for match in matches if match))
    (stored,) = {str(spec.dtype).removeprefix("torch.") for spec in weights.values()}
    plain = [name for name in specs if name not in weights and not is_scale(name)]
    matrices = [name.removesuffix(".weight") for name in plain if len(specs[name].shape) > 1]
    others = f"{', '.join(matrices)} (token by token), {len(plain) - len(matrices)} norms and biases (small)"
    elements = sum(spec.num_elements for spec in weights.values())
    num_bytes = sum(spec.num_bytes + specs[scale_name(name)].num_bytes for name, spec in weights.items())
    sizes = f"{num_bytes / 1e6:.1f} MB instead of {elements * dtype.itemsize / 1e6:.1f} MB"
    return [
        f"quantised weights ({stored}, a scale for each output row; products in {str(dtype).removeprefix('torch.')}): "
        f"{len(weights)} linear layers, {', '.join(layers)}: {sizes}; not {others}"
    ]

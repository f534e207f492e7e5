"""A decoder whose blocks multiply with quantised weights (`titan_opd.weights.quantization`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_opd.models import Decoder
from titan_opd.weights.quantization import TYPES, dequantize_rows, is_quantized, quantize_rows


class QuantizedLinear(nn.Module):
    """A linear layer that stores its weight in 8 bits and multiplies with what that stands for.

    The product is to the last bit that of a linear layer with the dequantised weight: `[..., inputs]` in,
    `[..., outputs]` out, in the inputs' dtype. That weight is made anew for each product and held no longer.

    Args:
        linear: is quantised; its bias is kept.
        dtype: of the stored weight, int8 or float8_e4m3fn.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        weight, scale = quantize_rows(linear.weight.detach(), dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, dequantize_rows(self.weight, self.weight_scale, x.dtype), self.bias)


def quantize_linears(decoder: Decoder, quantization: str) -> None:
    """Quantise the linear layers of a decoder's blocks, in place.

    Args:
        decoder: on its device, in `rollout.dtype`.
        quantization: "int8" or "fp8".
    """
    for name, module in list(decoder.named_modules()):
        if isinstance(module, nn.Linear) and is_quantized(f"{name}.weight"):
            parent, _, own = name.rpartition(".")
            setattr(decoder.get_submodule(parent), own, QuantizedLinear(module, TYPES[quantization]))

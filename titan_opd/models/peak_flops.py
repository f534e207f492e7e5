"""What a device can do at most: NVIDIA's public figures of dense matrix products in bfloat16.

Without sparsity, at the boost clock of the named form; a data sheet that gives the figure with 2:4 sparsity only is
halved. Under a power limit or on a warm day a device stays below.
"""

from __future__ import annotations

import re

# 10^12 operations a second. The first pattern that is found in the name holds, so the special forms come first.
_PEAK_TFLOPS = (
    (r"GB300|GB200", 2500.0),
    (r"B300|B200", 2250.0),
    (r"GH200|H200(?! NVL)", 989.4),
    (r"H200 NVL|H100 NVL", 835.5),
    (r"H100 PCIe", 756.5),
    (r"H100|H800(?! PCIe)", 989.4),
    (r"H20", 148.0),
    (r"A100|A800", 312.0),
    (r"A40", 149.7),
    (r"A30", 165.0),
    (r"A10", 125.0),
    (r"L40S", 362.05),
    (r"L40", 181.05),
    (r"L4", 121.0),
)


def peak_flops(device_name: str) -> float | None:
    """Operations a second of a device, by the name that `torch.cuda.get_device_name` gives; None for an unknown one.

    A part of a GPU (MIG) is unknown: it has a share that its name does not tell exactly.
    """
    if "MIG" in device_name:
        return None
    for pattern, tflops in _PEAK_TFLOPS:
        if re.search(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", device_name):
            return tflops * 1e12
    return None

"""What a device can do, by its datasheet, for the expected seconds of the roles."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A device's limits.

    Attributes:
        name: of the device, and where the figures come from.
        flops: of dense bfloat16 products, per second.
        bandwidth: of its memory, bytes per second.
        memory: bytes.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float


# NVIDIA's datasheets, products without sparsity. GB and TB are powers of ten there.
DEVICES = {
    "a100": Device("A100 SXM 80 GB (datasheet)", flops=312e12, bandwidth=2.039e12, memory=80e9),
    "h100": Device("H100 SXM 80 GB (datasheet)", flops=989.4e12, bandwidth=3.35e12, memory=80e9),
    "h200": Device("H200 SXM 141 GB (datasheet)", flops=989.4e12, bandwidth=4.8e12, memory=141e9),
}


def pick_device(name: str, *, flops: float | None, bandwidth: float | None) -> Device:
    """A known device, with figures of one's own where they are given.

    Args:
        name: key of `DEVICES`.
        flops: TFLOP/s instead of the datasheet's.
        bandwidth: GB/s instead of the datasheet's.

    Raises:
        ValueError: the device is unknown, or a figure is not above 0.
    """
    if name not in DEVICES:
        raise ValueError(
            f"--device {name} is not in the table; known: {', '.join(DEVICES)}; for another one give --flops and "
            "--bandwidth"
        )
    for option, value in (("--flops", flops), ("--bandwidth", bandwidth)):
        if value is not None and not value > 0:
            raise ValueError(f"{option} {value:g} must be above 0")
    known = DEVICES[name]
    if flops is None and bandwidth is None:
        return known
    return Device(
        name=f"{known.name} with figures given",
        flops=known.flops if flops is None else flops * 1e12,
        bandwidth=known.bandwidth if bandwidth is None else bandwidth * 1e9,
        memory=known.memory,
    )

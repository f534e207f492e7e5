"""What a device can do, by its datasheet, for the expected seconds of the roles."""

from __future__ import annotations

from dataclasses import dataclass

from titan_opd.models.peak_flops import peak_flops


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


def _device(name: str, form: str, *, bandwidth: float, memory: float) -> Device:
    flops = peak_flops(name)
    assert flops is not None
    return Device(f"{name} {form} (datasheet)", flops, bandwidth, memory)


# Memory by NVIDIA's datasheets, whose GB and TB are powers of ten.
DEVICES = {
    "a100": _device("A100", "SXM 80 GB", bandwidth=2.039e12, memory=80e9),
    "h100": _device("H100", "SXM 80 GB", bandwidth=3.35e12, memory=80e9),
    "h200": _device("H200", "SXM 141 GB", bandwidth=4.8e12, memory=141e9),
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

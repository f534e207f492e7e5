"""MFU and tokens per second and device."""

from __future__ import annotations

import pytest

from titan_opd.models.config import DecoderConfig
from titan_opd.models.flops import causal_pairs
from titan_opd.models.peak_flops import peak_flops
from titan_opd.observe.utilization import utilization_metrics

# Of a layer 4 * 6 (query) + 2 * 4 * 3 (key, value) + 6 * 4 (output) + 3 * 4 * 6 (feed-forward) = 144.
CONFIG = DecoderConfig(
    family="llama",
    vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=3,
    max_position_embeddings=8,
)


def test_mfu_by_hand():
    """Sequences of 3 and 2 tokens, 3 of the 5 trained, on 3 devices in 2 seconds."""
    layers = 2 * (2 * 144) * 5
    attention = 2 * (2 * 2 * (2 * 3)) * (1 + 2 + 3 + 1 + 2)
    head = 2 * 10 * 4 * 3
    assert (layers, attention, head) == (2880, 432, 240)
    metrics = utilization_metrics(
        CONFIG,
        num_tokens=5,
        num_rows=3,
        num_pairs=causal_pairs([3, 2]),
        seconds=2.0,
        num_devices=3,
        peak_flops=3552.0,
    )
    assert metrics == {
        "tokens_per_second/train_per_device": pytest.approx(5 / 6),
        "mfu": pytest.approx(3 * (2880 + 432 + 240) / (2 * 3 * 3552)),
    }


def test_without_a_peak_there_is_no_mfu():
    metrics = utilization_metrics(
        CONFIG, num_tokens=5, num_rows=3, num_pairs=9, seconds=2.0, num_devices=1, peak_flops=None
    )
    assert set(metrics) == {"tokens_per_second/train_per_device"}


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121.0),
    ],
)
def test_the_peak_of_a_device(name, tflops):
    assert peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize("name", ["NVIDIA A10G", "NVIDIA H800 PCIe", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "Tesla T4"])
def test_a_device_that_is_not_in_the_table(name):
    assert peak_flops(name) is None

"""GPU counters, on a driver that is played."""

from __future__ import annotations

import os
import queue

import pynvml
import pytest
import torch

from tests.unit.observe.fake_nvml import UUID, FakeNvml
from titan_opd.observe import gpu_counters
from titan_opd.observe.gpu_counters import (
    GpuCounters,
    GpuSample,
    GpuSummary,
    NoGpuCountersError,
    gpu_metrics,
    open_gpu_counters,
)

LONGEST = 60  # seconds until a test gives up


@pytest.fixture
def nvml():
    return FakeNvml()


@pytest.fixture
def said():
    return queue.Queue()


@pytest.fixture
def counters(nvml, said, monkeypatch):
    """With a reading at every millisecond."""
    monkeypatch.setattr(gpu_counters, "SAMPLE_SECONDS", 0.001)
    counters = GpuCounters(UUID, say=said.put, nvml=nvml)
    yield counters
    counters.close()


def next_summary(counters):
    """Of readings that began after the call."""
    counters.take()
    found = 0
    while True:
        summary = counters.take()
        found += summary is not None
        if found == 2:  # the first may have begun before
            return summary


def test_every_counter_has_its_unit(counters):
    assert next_summary(counters) == GpuSummary(
        {
            "utilization_percent": 80,
            "memory_used_mb": 3 * 1024,
            "memory_total_mb": 80 * 1024,
            "power_watts": 500,
            "power_limit_watts": 700,
            "sm_clock_mhz": 1755,
            "memory_clock_mhz": 2619,
            "temperature_celsius": 61,
            "ecc_corrected": 0,
            "ecc_uncorrected": 0,
            "throttled_share": 0,
        },
        frozenset(),
    )


def test_what_throttles_has_a_name_and_idleness_is_no_throttling(counters, nvml):
    nvml.reasons = pynvml.nvmlClocksEventReasonGpuIdle | pynvml.nvmlClocksEventReasonApplicationsClocksSetting
    assert next_summary(counters).throttling == set()
    nvml.reasons = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    summary = next_summary(counters)
    assert summary.throttling == {"power_cap", "hardware_thermal_slowdown"}
    assert summary.values["throttled_share"] == 1


def test_what_a_gpu_does_not_have_is_left_out(counters, nvml):
    nvml.missing = {"ecc", "reasons"}
    summary = next_summary(counters)
    assert not {"ecc_corrected", "ecc_uncorrected", "throttled_share"} & set(summary.values)
    assert summary.values["power_watts"] == 500


def test_new_ecc_errors_are_told_once_and_old_ones_never(nvml, said, monkeypatch):
    monkeypatch.setattr(gpu_counters, "SAMPLE_SECONDS", 0.001)
    nvml.corrected, nvml.uncorrected = 7, 1  # of another job
    counters = GpuCounters(UUID, say=said.put, nvml=nvml)
    next_summary(counters)
    assert said.empty()
    nvml.corrected = 9
    assert "2 corrected ECC errors more (9 since its driver was loaded)" in said.get(timeout=LONGEST)
    nvml.uncorrected = 2
    text = said.get(timeout=LONGEST)
    assert "1 uncorrected ECC errors more" in text
    assert UUID in text
    next_summary(counters)
    assert said.empty()
    counters.close()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, "is lost: it has fallen off the bus"),
        (pynvml.NVML_ERROR_UNKNOWN, "end here: Unknown Error"),
    ],
)
def test_a_gpu_that_is_lost_is_told_and_ends_nothing_else(counters, nvml, said, fault, text):
    next_summary(counters)
    nvml.fault = fault
    line = said.get(timeout=LONGEST)
    assert text in line
    assert f"NVIDIA H100 80GB HBM3 ({UUID})" in line
    counters._thread.join(LONGEST)
    counters.take()
    assert counters.take() is None
    assert said.empty()


def test_a_gpu_that_the_driver_does_not_know(nvml, said):
    with pytest.raises(NoGpuCountersError, match="GPU-other: Not Found"):
        GpuCounters("GPU-other", say=said.put, nvml=nvml)


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a driver")
def test_a_machine_without_a_driver(said):
    with pytest.raises(NoGpuCountersError, match="NVML Shared Library Not Found"):
        GpuCounters(UUID, say=said.put)


def test_on_a_cpu_nothing_is_recorded_and_a_line_says_so(said):
    cpu = torch.device("cpu")
    assert open_gpu_counters("auto", cpu, say=said.put) is None
    assert said.get(timeout=LONGEST) == "GPU counters: none, this process computes on the CPU"
    assert open_gpu_counters("off", cpu, say=said.put) is None
    assert said.empty()
    with pytest.raises(ValueError, match=r"observe.gpu_counters = 'on', and there are none: .* CPU; set it to"):
        open_gpu_counters("on", cpu, say=said.put)


def test_the_gpu_is_found_by_its_uuid_not_by_its_number(nvml, said, monkeypatch):
    """CUDA's device 0 is the second of the machine under CUDA_VISIBLE_DEVICES=1, and NVML counts all."""

    class Properties:
        uuid = UUID.removeprefix("GPU-")

    monkeypatch.setattr(gpu_counters, "SAMPLE_SECONDS", 0.001)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    counters = open_gpu_counters("on", torch.device("cuda", 0), say=said.put, nvml=nvml)
    assert next_summary(counters).values["sm_clock_mhz"] == 1755
    counters.close()


def test_a_steps_readings_become_one():
    samples = [
        GpuSample({"utilization_percent": 20, "temperature_celsius": 60, "power_limit_watts": 700}, frozenset()),
        GpuSample({"utilization_percent": 40, "temperature_celsius": 70, "power_limit_watts": 650}, None),
        GpuSample({"utilization_percent": 90, "temperature_celsius": 65}, frozenset({"power_cap"})),
    ]
    expected = {
        "utilization_percent": 50,
        "temperature_celsius": 70,
        "power_limit_watts": 650,
        "throttled_share": 0.5,
    }
    assert GpuSummary.of(samples) == GpuSummary(expected, frozenset({"power_cap"}))


def test_metrics_are_the_extremes_over_the_gpus():
    summaries = [
        GpuSummary({"power_watts": 300.0, "throttled_share": 0.0}),
        None,
        GpuSummary({"power_watts": 690.0, "throttled_share": 0.25}, frozenset({"power_cap", "power_brake"})),
    ]
    assert gpu_metrics(summaries) == {
        "gpu/power_watts/min": 300.0,
        "gpu/power_watts/max": 690.0,
        "gpu/throttled_share/min": 0.0,
        "gpu/throttled_share/max": 0.25,
        "gpu/throttling": "power_brake, power_cap",
    }
    assert gpu_metrics([None, None]) == {}

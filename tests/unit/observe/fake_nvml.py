"""NVML as `pynvml` shows it, for machines without a GPU: one device, whose readings a test sets.

Names, units and errors are pynvml's own; what it answers is not checked against a driver.
"""

from __future__ import annotations

from types import SimpleNamespace

import pynvml

UUID = "GPU-5b1a0000-0000-0000-0000-000000000001"


class FakeNvml:
    """Stands in for the module; `fault` is raised by every reading, `missing` are functions that the device lacks."""

    def __init__(self):
        self.fault = None
        self.missing = set()
        self.reasons = 0
        self.corrected = 0
        self.uncorrected = 0
        self.power_milliwatts = 500_000
        self.utilization = 80

    def __getattr__(self, name):
        return getattr(pynvml, name)  # constants and errors

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != UUID:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle"

    def nvmlDeviceGetName(self, handle):
        assert handle == "handle"
        return "NVIDIA H100 80GB HBM3"

    def _answer(self, name, value):
        if self.fault is not None:
            raise pynvml.NVMLError(self.fault)
        if name in self.missing:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value

    def nvmlDeviceGetUtilizationRates(self, handle):
        return self._answer("utilization", SimpleNamespace(gpu=self.utilization, memory=33))

    def nvmlDeviceGetMemoryInfo(self, handle):
        return self._answer("memory", SimpleNamespace(used=3 * 2**30, total=80 * 2**30, free=77 * 2**30))

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._answer("power", self.power_milliwatts)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return self._answer("limit", 700_000)

    def nvmlDeviceGetClockInfo(self, handle, clock):
        return self._answer("clock", {pynvml.NVML_CLOCK_SM: 1755, pynvml.NVML_CLOCK_MEM: 2619}[clock])

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._answer("temperature", 61)

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):
        assert counter == pynvml.NVML_VOLATILE_ECC
        errors = {
            pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED: self.corrected,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED: self.uncorrected,
        }
        return self._answer("ecc", errors[kind])

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self._answer("reasons", self.reasons)

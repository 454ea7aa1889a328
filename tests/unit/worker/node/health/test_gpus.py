"""Tests how the agent reads facts about GPUs: from a fake NVML, from the stub file of local mode, and without GPUs."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from worker.core.node_health import GpuFacts
from worker.errors import StubRefused
from worker.node.health import gpus
from worker.node.health.gpus import STUB_NAME, NoGpus, NvmlGpus, StubGpus, gpu_reader


class NVMLError(Exception):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


class NVMLError_Timeout(NVMLError):
    pass


class FakeNvml(SimpleNamespace):
    """The functions of pynvml that the product calls. The test sets their results."""

    NVMLError, NVMLError_GpuIsLost, NVMLError_Timeout = NVMLError, NVMLError_GpuIsLost, NVMLError_Timeout
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, nvmlEventTypeXidCriticalError = 1, 0, 8
    nvmlClocksEventReasonHwSlowdown, nvmlClocksEventReasonSwThermalSlowdown = 0x8, 0x20
    nvmlClocksEventReasonHwThermalSlowdown, nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x40, 0x80

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.events: list[tuple[int, int]] = []
        self.registered: list[int] = []
        self.lost: set[int] = set()
        self.reasons = 0
        self.is_shut = False

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None:
        self.is_shut = True

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise NVMLError_GpuIsLost
        return 100 + index

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle - 100

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "H200"

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlEventSetFree(self, events: object) -> None: ...

    def nvmlDeviceRegisterEvents(self, handle: int, kind: int, events: object) -> None:
        assert kind == 8
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:
        assert timeout_ms == 0
        if not self.events:
            raise NVMLError_Timeout
        index, xid = self.events.pop(0)
        return SimpleNamespace(device=100 + index, eventData=xid)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        if handle - 100 in self.lost:
            raise NVMLError_GpuIsLost
        return self.reasons

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0)
        return 3

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        raise NVMLError("not supported")

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=75, memory=1)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return fake


def test_what_nvml_tells(nvml: FakeNvml) -> None:
    reader = gpu_reader({})
    assert nvml.registered == [100, 101]
    nvml.events = [(1, 79), (1, 13)]
    nvml.reasons = 0x4 | 0x40  # two reasons for a lower clock: the power cap, which is harmless, and the thermal limit
    first, second = reader.read()
    assert first == GpuFacts(
        index=0, name="H200", ecc_uncorrectable=3, slowed_by=("heat, by hardware",), busy_percent=75.0
    )
    assert (second.index, second.xids) == (1, (79, 13))
    assert [gpu.xids for gpu in reader.read()] == [(), ()], "an Xid is told once"
    reader.close()
    assert nvml.is_shut


def test_a_gpu_that_fell_off_is_lost_and_the_others_are_read(nvml: FakeNvml) -> None:
    reader = NvmlGpus()
    nvml.lost = {0}
    first, second = reader.read()
    assert (first.is_lost, second.is_lost) == (True, False)


def test_a_gpu_that_had_fallen_off_before_is_lost(nvml: FakeNvml) -> None:
    nvml.lost = {1}
    assert [gpu.is_lost for gpu in NvmlGpus().read()] == [False, True]


def test_the_real_library_has_every_name_that_is_used() -> None:
    source = Path(gpus.__file__).read_text()
    used = set(re.findall(r"nvml\.((?:nvml|NVML)\w+)", source))
    assert len(used) > 15
    assert used <= set(dir(pynvml))


def test_without_a_driver_there_are_no_gpus_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise NVMLError("NVML Shared Library Not Found")

    monkeypatch.setattr(nvml, "nvmlInit", refuse)
    with caplog.at_level(logging.INFO):
        reader = gpu_reader({})
        assert isinstance(reader, NoGpus)
        assert reader.read() == reader.read() == ()
    assert [record.message for record in caplog.records] == ["no GPUs are watched: NVML: NVML Shared Library Not Found"]


def test_without_the_library_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert isinstance(gpu_reader({}), NoGpus)


def test_a_stub_is_refused_outside_of_local_mode(tmp_path: Path) -> None:
    for environment in ({}, {"EVERSTEP_LOCAL": "0"}):
        with pytest.raises(StubRefused, match="EVERSTEP_LOCAL"):
            gpu_reader({"EVERSTEP_NVML_STUB": str(tmp_path / "gpus.json"), **environment})


def test_a_stub_says_what_its_file_says(tmp_path: Path) -> None:
    file = tmp_path / "gpus.json"
    reader = gpu_reader({"EVERSTEP_NVML_STUB": str(file), "EVERSTEP_LOCAL": "1"})
    assert isinstance(reader, StubGpus)
    assert reader.read() == ()
    file.write_text(
        json.dumps(
            {
                "gpus": [
                    {"index": 0, "xids": [79], "ecc_uncorrectable": 1, "throttled": True, "lost": True},
                    {"index": 1},
                ]
            }
        )
    )
    found = reader.read()
    assert found == (
        GpuFacts(index=0, name=STUB_NAME, xids=(79,), ecc_uncorrectable=1, slowed_by=("hardware",), is_lost=True),
        GpuFacts(index=1, name=STUB_NAME),
    )
    file.write_text('{"gpus": [{"index"')
    assert reader.read() == found, "a file that is being written is what it was"
    file.unlink()
    assert reader.read() == ()

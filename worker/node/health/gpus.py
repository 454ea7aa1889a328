"""Reads the state of this node's GPUs from NVML, or from a stub file in a local cluster.

    EVERSTEP_NVML_STUB=FILE
    {"gpus": [{"index": 0, "xids": [79], "ecc_uncorrectable": 0, "throttled": false, "lost": false}]}

A stub file is read again at every reading. A missing file means that the node has no GPUs. Outside local mode a stub is
refused, because a real node must not report simulated GPUs.

Invariant: without the library or the driver, the node has no GPUs. A fact that a GPU does not provide is omitted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from worker.core.node_health import GpuFacts
from worker.errors import StubRefused

log = logging.getLogger(__name__)
STUB_VARIABLE = "EVERSTEP_NVML_STUB"
STUB_NAME = "NVIDIA H100 80GB HBM3"
_T = TypeVar("_T")


class GpuReader(Protocol):
    """Source of GPU readings. Only one thread may use it."""

    def read(self) -> tuple[GpuFacts, ...]:
        """Return the current facts of all GPUs. The call blocks until the driver answers."""
        ...

    def close(self) -> None:
        """Close the connection to the GPU driver."""
        ...


def gpu_reader(environment: Mapping[str, str] = os.environ) -> GpuReader:
    """Return this node's source: a stub that the environment names, NVML if available, or a source without GPUs.

    Raises StubRefused if the environment names a stub outside local mode.
    """
    stub = environment.get(STUB_VARIABLE)
    if stub:
        if environment.get("EVERSTEP_LOCAL") != "1":
            raise StubRefused(f"{STUB_VARIABLE} is for local clusters only: EVERSTEP_LOCAL is not 1")
        return StubGpus(Path(stub))
    try:
        return NvmlGpus()
    except _NoNvml as error:
        log.info("no GPUs are watched: %s", error)
        return NoGpus()


class NoGpus:
    """Source of GPU readings on a node without GPUs; every reading is empty."""

    def read(self) -> tuple[GpuFacts, ...]:
        return ()

    def close(self) -> None:
        """Do nothing (see `GpuReader`)."""


class _StubGpu(msgspec.Struct, forbid_unknown_fields=True):
    index: int
    xids: list[int] = []
    ecc_uncorrectable: int = 0
    throttled: bool = False
    lost: bool = False
    busy_percent: float | None = None


class _StubFile(msgspec.Struct, forbid_unknown_fields=True):
    gpus: list[_StubGpu] = []


_stub_file = msgspec.json.Decoder(_StubFile)


class StubGpus:
    """Source of readings of simulated GPUs, which a stub file describes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: tuple[GpuFacts, ...] = ()

    def read(self) -> tuple[GpuFacts, ...]:
        try:
            found = _stub_file.decode(self._path.read_bytes())
        except FileNotFoundError:
            self._last = ()
        except (OSError, msgspec.MsgspecError) as error:
            log.debug("%s cannot be read: %s", self._path, error)
        else:
            self._last = tuple(_of_stub(gpu) for gpu in found.gpus)
        return self._last

    def close(self) -> None:
        """Do nothing, because no connection to a GPU driver is open."""


def _of_stub(gpu: _StubGpu) -> GpuFacts:
    return GpuFacts(
        index=gpu.index,
        name=STUB_NAME,
        xids=tuple(gpu.xids),
        ecc_uncorrectable=gpu.ecc_uncorrectable,
        slowed_by=("hardware",) if gpu.throttled else (),
        is_lost=gpu.lost,
        busy_percent=gpu.busy_percent,
    )


class _NoNvml(Exception):
    """Raised if the NVML library or the driver is missing."""


class NvmlGpus:
    """Source of GPU readings through NVML (`nvidia-ml-py`, which only this class imports)."""

    def __init__(self) -> None:
        """Open the NVML library. Raises _NoNvml if the library or the driver is missing."""
        try:
            import pynvml
        except ImportError as error:
            raise _NoNvml("nvidia-ml-py is not installed") from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _NoNvml(f"NVML: {error}") from error
        self._handles: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            self._names[index] = ""
            with suppress(pynvml.NVMLError):  # The call fails for a GPU that is already lost.
                self._handles[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
                self._names[index] = pynvml.nvmlDeviceGetName(self._handles[index])
        self._events = self._register()
        self._slow = {
            pynvml.nvmlClocksEventReasonHwSlowdown: "hardware",
            pynvml.nvmlClocksEventReasonHwThermalSlowdown: "heat, by hardware",
            pynvml.nvmlClocksEventReasonSwThermalSlowdown: "heat, by the driver",
            pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
        }
        log.info("watching %d GPUs: %s", len(self._names), ", ".join(sorted(set(self._names.values()))))

    def read(self) -> tuple[GpuFacts, ...]:
        xids = self._xids()
        return tuple(self._facts(index, tuple(xids.get(index, ()))) for index in self._names)

    def close(self) -> None:
        if self._events is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._events)
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _facts(self, index: int, xids: tuple[int, ...]) -> GpuFacts:
        nvml, handle = self._nvml, self._handles.get(index)
        if handle is None:
            return GpuFacts(index=index, is_lost=True)
        try:
            reasons = self._ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)), 0)
            uncorrectable, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            return GpuFacts(
                index=index,
                name=self._names[index],
                xids=xids,
                ecc_uncorrectable=self._ask(
                    lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrectable, volatile)), 0
                ),
                is_remapping_failed=self._ask(lambda: bool(nvml.nvmlDeviceGetRemappedRows(handle)[3]), False),
                slowed_by=tuple(words for bit, words in self._slow.items() if reasons & bit),
                busy_percent=self._ask(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu), None),
            )
        except nvml.NVMLError_GpuIsLost:
            return GpuFacts(index=index, name=self._names[index], xids=xids, is_lost=True)

    def _ask(self, question: Callable[[], _T], unknown: _T) -> _T:
        try:
            return question()
        except self._nvml.NVMLError_GpuIsLost:
            raise
        except self._nvml.NVMLError:
            return unknown

    def _register(self) -> Any:
        """Subscribe to Xid errors of the driver; return None if the driver offers no events."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            for handle in self._handles.values():
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError as error:
            log.warning("the driver does not report Xid errors: %s", error)
            return None
        return events

    def _xids(self) -> dict[int, list[int]]:
        """Return the Xid errors that the driver has reported since the last reading, by GPU."""
        found: dict[int, list[int]] = {}
        while self._events is not None:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                found.setdefault(int(self._nvml.nvmlDeviceGetIndex(event.device)), []).append(int(event.eventData))
            except self._nvml.NVMLError_Timeout:
                break
            except self._nvml.NVMLError as error:  # If the GPU is lost, other NVML calls report this as a fault.
                log.debug("Xid errors cannot be read: %s", error)
                break
        return found

"""Reads logged values that a GPU is still computing, without making training wait.

    log(loss=…)       training stream  … backward │ copy to pinned memory │ event
    boundary, log     pass on each record whose event is reached, in the order of the log calls
    close             wait, then pass on all records

A record consists of the values of one log call. If no place of the pinned memory is free, it is dropped and counted.

Invariant: only `close` makes the training thread wait for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from everstep.protocol.ids import Step
from everstep.training.cuda_device import CudaDevice, CudaEvent, Device
from everstep.training.metrics import MetricRing, numbers

PLACES: Final = 1024
"""Values per device that are still being computed or copied."""
_NUMBER_BYTES: Final = 8


def cuda_device_of(tensor: torch.Tensor) -> Device | None:
    """Return the CUDA device of a tensor, or None for a tensor in CPU memory."""
    return CudaDevice(tensor.get_device()) if tensor.is_cuda else None


class _Places:
    """Pinned host memory for values of one device, 8 bytes each."""

    def __init__(self, device: Device, count: int) -> None:
        self.device = device
        self.count = count
        self.pinned = device.pinned(count * _NUMBER_BYTES).view(torch.float64)
        self.free = list(range(count))


@dataclass(frozen=True, slots=True)
class _Coming:
    """The values of one log call that one device is still computing or copying."""

    places: _Places
    taken: Mapping[str, int]
    """Index in the pinned memory by the value's name."""
    event: CudaEvent


@dataclass(frozen=True, slots=True)
class _Record:
    step: Step
    known: Mapping[str, float]
    coming: tuple[_Coming, ...]
    at_seconds: float


class DeviceNumbers:
    """Delays logged values until they are in host memory, in order. Used only by the training thread."""

    def __init__(
        self,
        ring: MetricRing,
        device_of: Callable[[torch.Tensor], Device | None] = cuda_device_of,
        now: Callable[[], float] = time.time,
        *,
        place_count: int = PLACES,
    ) -> None:
        self._place_count = place_count
        self._ring = ring
        self._device_of = device_of
        self._now = now
        self._places: dict[int, _Places] = {}
        self._records: deque[_Record] = deque()

    def add(self, step: Step, values: Mapping[str, float | torch.Tensor]) -> None:
        """Add the values of one log call. Raises SessionMisuse if a value is not one real number."""
        known, tensors = numbers(values, is_later=lambda tensor: self._device_of(tensor) is not None)
        if any(device is not None and device.is_capturing() for device in map(self._device_of, tensors.values())):
            # Drop the values of a log call inside a graph capture, because they exist only when the graph is replayed.
            self._ring.drop()
            return
        self.settle()
        if not tensors and not self._records:
            self._ring.add(step, known)
            return
        by_device: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            by_device.setdefault(tensor.get_device(), {})[name] = tensor
        by_place = {self._places_of(index, some): some for index, some in by_device.items()}
        if len(self._records) >= self._place_count or any(
            len(some) > len(places.free) for places, some in by_place.items()
        ):
            self._ring.drop()
            return
        coming = tuple(_sent(places, some) for places, some in by_place.items())
        self._records.append(_Record(step, known, coming, self._now()))

    def settle(self) -> None:
        """Pass on the records whose values have arrived, up to the first that has not. Never waits."""
        # A query of the device would break the capture.
        if any(places.device.is_capturing() for places in self._places.values()):
            return
        while self._records and all(each.event.query() for each in self._records[0].coming):
            record = self._records.popleft()
            arrived = {
                name: float(each.places.pinned[place]) for each in record.coming for name, place in each.taken.items()
            }
            for each in record.coming:
                each.places.free.extend(each.taken.values())
            self._ring.add(record.step, {**record.known, **arrived}, record.at_seconds)

    def close(self) -> None:
        """Wait for all logged values, and pass them on. Values of a failed device count as dropped."""
        try:
            for record in self._records:
                for each in record.coming:
                    each.event.synchronize()
            self.settle()
        except RuntimeError:  # Do not raise the driver's error, because the script receives it from its own calls.
            while self._records:
                self._records.popleft()
                self._ring.drop()

    def _places_of(self, index: int, tensors: Mapping[str, torch.Tensor]) -> _Places:
        places = self._places.get(index)
        if places is None or places.count < len(tensors):
            # Allocate new memory, because the script logs more values than before. Values that are still being copied
            # keep their places in the old memory.
            device = self._device_of(next(iter(tensors.values())))
            assert device is not None
            places = self._places[index] = _Places(device, max(self._place_count, len(tensors)))
        return places


def _sent(places: _Places, tensors: Mapping[str, torch.Tensor]) -> _Coming:
    device, stream, event = places.device, places.device.current_stream(), places.device.new_event()
    taken = {name: places.free.pop() for name in tensors}
    for name, place in taken.items():
        device.copy(places.pinned[place : place + 1], tensors[name])
    event.record(stream)
    return _Coming(places, taken, event)

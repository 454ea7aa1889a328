"""Numbers that a script logs while its device still works them out: copied behind that work, and read once they are there.

    log(loss=…)       training stream  … backward │ copy to pinned memory │ event
    boundary, log     every record whose event is reached goes on, in the order in which records were logged
    close             all of them, after a wait

Invariant: but for `close` the training thread never waits for the device. What a device that is far behind leaves no
room for is dropped and counted. Checked with the fake device of the copier's tests; it has not met a real one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from everstep.protocol.ids import Step
from everstep.training.cuda_copier import CudaDevice, Device, Event
from everstep.training.metrics import MetricRing, numbers

PLACES: Final = 1024
"""Numbers that may be on their way from one device; as many as are logged at once, where that is more."""
_NUMBER_BYTES: Final = 8


def cuda_device_of(tensor: torch.Tensor) -> Device | None:
    """Return the device that a tensor lies on, or None where it can be read at once."""
    return CudaDevice(tensor.get_device()) if tensor.is_cuda else None


class _Places:
    """Where numbers of one device arrive."""

    def __init__(self, device: Device, count: int) -> None:
        self.device = device
        self.count = count
        self.pinned = device.pinned(count * _NUMBER_BYTES).view(torch.float64)
        self.free = list(range(count))


@dataclass(frozen=True, slots=True)
class _Coming:
    """Numbers of one record that are on their way from one device."""

    places: _Places
    taken: Mapping[str, int]
    """Place by name."""
    event: Event


@dataclass(frozen=True, slots=True)
class _Record:
    """What was logged at once."""

    step: Step
    known: Mapping[str, float]
    coming: tuple[_Coming, ...]
    at_seconds: float


class DeviceNumbers:
    """Stands before the ring. Used by the training thread alone.

    Args:
        ring: takes records, in order.
        device_of: the device that a tensor lies on; None: it can be read at once.
        now: Unix time.
    """

    def __init__(
        self,
        ring: MetricRing,
        device_of: Callable[[torch.Tensor], Device | None] = cuda_device_of,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._ring = ring
        self._device_of = device_of
        self._now = now
        self._places: dict[int, _Places] = {}
        self._records: deque[_Record] = deque()

    def add(self, step: Step, values: Mapping[str, float | torch.Tensor]) -> None:
        """Take what a script logs.

        Args:
            step: that it belongs to.
            values: numbers, and tensors of one real number.

        Raises:
            SessionMisuse: a value is something else; by name.
        """
        known, tensors = numbers(values, is_later=lambda tensor: self._device_of(tensor) is not None)
        if any(device is not None and device.is_capturing() for device in map(self._device_of, tensors.values())):
            self._ring.drop()  # what a graph contains is worked out when it is replayed
            return
        self.settle()
        if not tensors and not self._records:
            self._ring.add(step, known)
            return
        by_device: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            by_device.setdefault(tensor.get_device(), {})[name] = tensor
        by_place = {self._places_of(index, some): some for index, some in by_device.items()}
        if len(self._records) >= PLACES or any(len(some) > len(places.free) for places, some in by_place.items()):
            self._ring.drop()
            return
        coming = tuple(_sent(places, some) for places, some in by_place.items())
        self._records.append(_Record(step, known, coming, self._now()))

    def settle(self) -> None:
        """Give on what has arrived.

        Waits for nothing, and does nothing while the script captures a graph, which to ask the device would spoil.
        """
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
        """Give on everything; waits for the device.

        What one that has failed does not give any more is counted as dropped.
        """
        try:
            for record in self._records:
                for each in record.coming:
                    each.event.synchronize()
            self.settle()
        except RuntimeError:  # torch's word for what the driver says; the script has heard of it, or will
            while self._records:
                self._records.popleft()
                self._ring.drop()

    def _places_of(self, index: int, tensors: Mapping[str, torch.Tensor]) -> _Places:
        places = self._places.get(index)
        if places is None or places.count < len(tensors):  # what is on its way keeps the places that it has
            device = self._device_of(next(iter(tensors.values())))
            assert device is not None
            places = self._places[index] = _Places(device, max(PLACES, len(tensors)))
        return places


def _sent(places: _Places, tensors: Mapping[str, torch.Tensor]) -> _Coming:
    """Have numbers copied behind what the training stream has been given so far."""
    device, stream, event = places.device, places.device.current_stream(), places.device.new_event()
    taken = {name: places.free.pop() for name in tensors}
    for name, place in taken.items():
        device.copy(places.pinned[place : place + 1], tensors[name], stream)
    event.record(stream)
    return _Coming(places, taken, event)

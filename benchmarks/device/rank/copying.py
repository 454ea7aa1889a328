"""Measures captures (copies of a state into a slot) and restores from the slot. The floor is a plain pinned copy.

    capture   through the bounce ring (before registration) ─▶ registration ─▶ floor, capture, capture, floor, …
              ─▶ a fresh slot without memory pages: registration ─▶ capture
              after each kind of capture (ring, registered slot, fresh slot), every byte is compared
    restore   floor, restore, restore, floor, … each into a reset state; every byte is compared

Registration pins the memory of a slot with the GPU driver. The bounce ring is a set of pinned buffers, through which
the product copies while the slot is not registered.

Invariant: the state changes completely between two captures, so earlier content of the slot cannot speed a capture up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.device.rank.hardware import Hardware, Registration
from benchmarks.device.rank.state import Slot, State, bytes_of
from everstep.training.copier import Copier

PINNED_BYTES = 1 << 30
"""Largest size in bytes of the pinned buffer that plain copies use.

For a larger state, the buffer is copied repeatedly until as many bytes were moved.
"""


@dataclass
class Captures:
    """Durations in seconds of all captures of one kind.

    A capture copies through a ring of pinned buffers, or directly into a slot whose memory the GPU driver has pinned.
    """

    seconds: list[float] = field(default_factory=list)
    """Seconds from the start of each capture until the slot contained every byte."""
    begin_seconds: list[float] = field(default_factory=list)
    """Seconds for which the start of the capture blocked the training thread."""
    wait_seconds: list[float] = field(default_factory=list)
    """Seconds from the end of `begin_seconds` until the training thread may change the state."""
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU seconds that the whole process used during each capture."""
    allocation_count: int = 0
    """Number of allocations of device memory or pinned memory during the captures. None is expected."""
    equal: list[bool] = field(default_factory=list)


class Floor:
    """Measures the floor: the seconds of plain copies between pinned memory and the device.

    Args:
        hardware: the device.
        size: approximate bytes that one measurement moves.
    """

    def __init__(self, hardware: Hardware, size: int) -> None:
        self._hardware = hardware
        self._passes = max(1, round(size / PINNED_BYTES))
        length = min(size, PINNED_BYTES)
        self._pinned = hardware.pinned(length)
        self._pinned.zero_()
        self._on_device = torch.zeros(length, dtype=torch.uint8, device=hardware.device)
        self.moved_bytes = self._passes * length

    def to_host(self) -> float:
        """Copy the bytes from the device to pinned memory, and return the duration in seconds."""
        return self._measure(self._pinned, self._on_device)

    def to_device(self) -> float:
        """Copy the bytes from pinned memory to the device, and return the duration in seconds."""
        return self._measure(self._on_device, self._pinned)

    def _measure(self, target: torch.Tensor, source: torch.Tensor) -> float:
        self._hardware.synchronize()
        begun = time.perf_counter()
        for _ in range(self._passes):
            target.copy_(source, non_blocking=True)
        self._hardware.synchronize()
        return time.perf_counter() - begun


def order(rounds: int) -> Iterator[str]:
    """Yield `rounds` pairs of A (a plain copy) and B (a capture or restore), in the orders AB and BA by turns."""
    for number in range(rounds):
        yield from "AB" if number % 2 == 0 else "BA"


def capture(hardware: Hardware, size: int, rounds: int, folder: Path) -> dict[str, object]:
    """Measure captures of a state into slots of three kinds.

    - An unregistered slot: the capture copies through a ring of pinned buffers (the bounce ring).
    - A registered slot, whose memory the GPU driver has pinned: the capture copies directly.
    - A fresh slot, which has no memory pages before its registration.

    Args:
        hardware: the device that holds the state.
        size: bytes of the state.
        rounds: measurements of each kind.
        folder: folder on tmpfs for two slots.

    Returns:
        The measurements, in the form that `rows.of_capture` reads.
    """
    state = State(hardware.device, size)
    slot, registration = Slot(folder / "slot-0", state), Registration()
    copier = hardware.copier(registration)
    result: dict[str, object] = {"payload_bytes": slot.plan.index_offset, "tensors": len(slot.plan.entries)}
    try:
        # Make one capture more than is counted: the first capture allocates the slot's memory, so its rate is lower.
        result["bounce"] = _kind(hardware, copier, slot, rounds + 1)
        result["registration"] = _register(copier, slot, registration)
        floor = Floor(hardware, slot.plan.index_offset)
        floor.to_host()
        # Drop the times of the first capture after the slot's registration, as a warm-up.
        _capture(hardware, copier, slot, Captures())
        floors, registered = [], Captures()
        for letter in order(rounds):
            if letter == "A":
                floors.append(floor.to_host())
            else:
                _capture(hardware, copier, slot, registered)
        registered.equal.append(slot.is_equal())
        result |= {"floor": {"bytes": floor.moved_bytes, "seconds": floors}, "registered": asdict(registered)}
        fresh = Slot(folder / "slot-1", state)
        result["cold_registration"] = _register(copier, fresh, registration)
        result["fresh"] = _kind(hardware, copier, fresh, 1)
    except RuntimeError as error:  # After an error of torch or the driver, keep the measurements so far.
        result["failure"] = str(error)
    finally:
        copier.close()
    return result


def _kind(hardware: Hardware, copier: Copier, slot: Slot, rounds: int) -> dict[str, object]:
    found = Captures()
    for _ in range(rounds):
        _capture(hardware, copier, slot, found)
    found.equal.append(slot.is_equal())
    return asdict(found)


def _register(copier: Copier, slot: Slot, registration: Registration) -> dict[str, object]:
    before = len(registration.pieces)
    wanted = registration.registered_bytes + slot.mapped_bytes
    begun = time.perf_counter()
    copier.prepare(slot.memory)
    registration.wait(wanted)
    taken = time.perf_counter() - begun
    pieces = registration.pieces[before:]
    return {
        "bytes": sum(size for size, _ in pieces),
        "seconds": taken,
        "driver_seconds": sum(seconds for _, seconds in pieces),
    }


def restore(hardware: Hardware, size: int, rounds: int, folder: Path) -> dict[str, object]:
    """Measure restores of a state from a slot into a reset model and optimizer.

    Args:
        hardware: the device that holds the state.
        size: bytes of the state.
        rounds: number of measurements.
        folder: folder on tmpfs for a slot.

    Returns:
        The measurements, in the form that `rows.of_restore` reads.
    """
    state = State(hardware.device, size)
    slot = Slot(folder / "slot-0", state)
    copier = hardware.copier(Registration())
    _capture(hardware, copier, slot, Captures())
    copier.close()
    slot.seal()
    kept = {name: bytes_of(tensor).clone() for name, tensor in state.live().items()}
    floor = Floor(hardware, slot.plan.index_offset)
    floors: list[float] = []
    seconds: list[float] = []
    mappings: list[float] = []
    equal: list[bool] = []
    for letter in "AB" + "".join(order(rounds)):
        if letter == "A":
            floors.append(floor.to_device())
            continue
        state.forget()
        hardware.synchronize()
        begun = time.perf_counter()
        _, mapping = slot.restore()
        hardware.synchronize()
        seconds.append(time.perf_counter() - begun)
        mappings.append(mapping)
        live = state.live()
        equal.append(
            live.keys() == kept.keys()
            and all(torch.equal(bytes_of(tensor), kept[name]) for name, tensor in live.items())
        )
    return {
        "payload_bytes": slot.plan.index_offset,
        "tensors": len(slot.plan.entries),
        "floor": {"bytes": floor.moved_bytes, "seconds": floors[1:]},
        "seconds": seconds[1:],
        "mapping_seconds": mappings[1:],
        "equal": equal,
    }


def _capture(hardware: Hardware, copier: Copier, slot: Slot, found: Captures) -> None:
    slot.state.advance()
    copies = slot.copies()
    hardware.synchronize()
    errors: list[BaseException | None] = []
    before, cpu = hardware.allocation_count(), time.process_time()
    begun = time.perf_counter()
    ticket = copier.start(copies, errors.append, lambda _complete_count, _piece_bytes: None)
    may_go_on = time.perf_counter()
    ticket.wait()
    may_change = time.perf_counter()
    ticket.join()
    found.seconds.append(time.perf_counter() - begun)
    found.begin_seconds.append(may_go_on - begun)
    found.wait_seconds.append(may_change - may_go_on)
    found.cpu_seconds.append(time.process_time() - cpu)
    found.allocation_count += hardware.allocation_count() - before
    if errors != [None]:
        raise RuntimeError(f"the copy failed: {errors}") from errors[0]

"""Measures captures (copies of a state into a slot) and restores from the slot. The floor is a plain pinned copy.

    capture   through the bounce ring (before registration) ─▶ registration ─▶ floor, capture, capture, floor, …
              ─▶ a fresh slot without memory pages: registration ─▶ capture
              after each kind of capture (ring, registered slot, fresh slot), every byte is compared
    restore   floor, restore, restore, floor, … each into a reset state; every byte is compared

Registration pins a slot's memory with the GPU driver. Until then, captures copy through the bounce ring of pinned
buffers. The state changes completely between two captures.
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
"""Largest pinned buffer, which is copied repeatedly for a larger state."""


@dataclass
class Captures:
    """Durations of all captures of one kind."""

    seconds: list[float] = field(default_factory=list)
    """Seconds until the slot contained every byte."""
    begin_seconds: list[float] = field(default_factory=list)
    """Seconds for which the start blocked the training thread."""
    wait_seconds: list[float] = field(default_factory=list)
    """Seconds from then until the training thread may change the state."""
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU seconds of the whole process during each capture."""
    allocation_count: int = 0
    """Allocations of device or pinned memory during the captures. None is expected."""
    equal: list[bool] = field(default_factory=list)


class Floor:
    """Measures the seconds of plain copies of about `size` bytes between pinned memory and the device."""

    def __init__(self, hardware: Hardware, size: int) -> None:
        self._hardware = hardware
        self._passes = max(1, round(size / PINNED_BYTES))
        length = min(size, PINNED_BYTES)
        self._pinned = hardware.pinned(length)
        self._pinned.zero_()
        self._on_device = torch.zeros(length, dtype=torch.uint8, device=hardware.device)
        self.moved_bytes = self._passes * length

    def to_host(self) -> float:
        """Return the seconds of a copy from the device."""
        return self._measure(self._pinned, self._on_device)

    def to_device(self) -> float:
        """Return the seconds of a copy to the device."""
        return self._measure(self._on_device, self._pinned)

    def _measure(self, target: torch.Tensor, source: torch.Tensor) -> float:
        self._hardware.synchronize()
        begun = time.perf_counter()
        for _ in range(self._passes):
            target.copy_(source, non_blocking=True)
        self._hardware.synchronize()
        return time.perf_counter() - begun


def order(rounds: int) -> Iterator[str]:
    """Yield `rounds` pairs of A (a plain copy) and B (a capture or restore): AB, BA, AB …"""
    for number in range(rounds):
        yield from "AB" if number % 2 == 0 else "BA"


def capture(hardware: Hardware, size: int, rounds: int, folder: Path) -> dict[str, object]:
    """Measure captures through the bounce ring, into a registered slot, and into a fresh slot without pages.

    `folder` is on tmpfs. Returns what `rows.of_capture` reads.
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
    """Measure restores from a slot on tmpfs into a reset model and optimizer. Returns what `rows.of_restore` reads."""
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

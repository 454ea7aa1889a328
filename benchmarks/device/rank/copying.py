"""Capture into a slot and restore from it, beside the rate of pinned memory.

    capture   through the bounce ring (nothing registered) ─▶ registration ─▶ registered: floor, capture, capture, floor, …
              ─▶ another slot, whose pages nobody has touched: registration ─▶ capture; after each kind every byte is compared
    restore   floor, restore, restore, floor, … each into a state that has forgotten everything; every byte is compared

Invariant: a capture copies a state that has changed since the one before: what it found in the slot is no help to it.
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
"""Of the buffer that floors copy to and from, at most; they pass over it until they have moved as much as the state has."""


@dataclass
class Captures:
    """Captures of one kind; seconds."""

    seconds: list[float] = field(default_factory=list)
    """Until every byte was in the slot."""
    begin_seconds: list[float] = field(default_factory=list)
    """For which the training thread was held where the capture began."""
    wait_seconds: list[float] = field(default_factory=list)
    """For which it would have been held after that, had its next change come at once."""
    cpu_seconds: list[float] = field(default_factory=list)
    """Of the whole process."""
    allocation_count: int = 0
    """Requests for memory of the device, or pinned, while captures were under way."""
    equal: list[bool] = field(default_factory=list)


class Floor:
    """The rate of large copies between pinned memory and the device.

    Args:
        hardware: whose.
        size: bytes that one measurement moves, about.
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
        """Return the seconds of the copies from the device."""
        return self._measure(self._pinned, self._on_device)

    def to_device(self) -> float:
        """Return the seconds of the copies to the device."""
        return self._measure(self._on_device, self._pinned)

    def _measure(self, target: torch.Tensor, source: torch.Tensor) -> float:
        self._hardware.synchronize()
        begun = time.perf_counter()
        for _ in range(self._passes):
            target.copy_(source, non_blocking=True)
        self._hardware.synchronize()
        return time.perf_counter() - begun


def order(rounds: int) -> Iterator[str]:
    """Yield A for a floor and B for what is held against it, ABBA after ABBA, until there are `rounds` of each."""
    for number in range(rounds):
        yield from "AB" if number % 2 == 0 else "BA"


def capture(hardware: Hardware, size: int, rounds: int, folder: Path) -> dict[str, object]:
    """Measure captures.

    Args:
        hardware: whose memory the state lies in.
        size: of the state, bytes.
        rounds: of each kind.
        folder: on tmpfs, for two slots.

    Returns:
        What `rows.of_capture` takes.
    """
    state = State(hardware.device, size)
    slot, registration = Slot(folder / "slot-0", state), Registration()
    copier = hardware.copier(registration)
    result: dict[str, object] = {"payload_bytes": slot.plan.index_offset, "tensors": len(slot.plan.entries)}
    try:
        result["bounce"] = _kind(hardware, copier, slot, rounds + 1)  # the first one makes the pages
        result["registration"] = _register(copier, slot, registration)
        floor = Floor(hardware, slot.plan.index_offset)
        floor.to_host()
        _capture(hardware, copier, slot, Captures())  # both once, uncounted
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
    except RuntimeError as error:  # torch's and the driver's; what was measured before it stays
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
    copier.prepare(slot.memory)
    registration.wait(wanted)
    pieces = registration.pieces[before:]
    return {"bytes": sum(size for size, _ in pieces), "seconds": sum(seconds for _, seconds in pieces)}


def restore(hardware: Hardware, size: int, rounds: int, folder: Path) -> dict[str, object]:
    """Measure restores.

    Args:
        hardware: whose memory the state lies in.
        size: of the state, bytes.
        rounds: so many.
        folder: on tmpfs, for a slot.

    Returns:
        What `rows.of_restore` takes.
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

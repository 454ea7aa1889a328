"""Injects faults into the processes and the memory of one instance.

Each function has its effect or raises an error. It returns facts that a test can verify: pids, files, bytes.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from everstep.protocol.errors import ProtocolError
from everstep.protocol.slot import HEADER_BYTES, SlotState, unpack_header
from infra.local_cloud.errors import FaultRefused
from infra.local_cloud.instance_init import memory_directory
from infra.local_cloud.parts import write_private
from infra.local_cloud.processes import Process, descendants, is_agent, memory_of, rank_of, wait_gone

GONE_SECONDS: Final = 10.0
Facts = dict[str, Any]


def kill_rank(init_pid: int, rank: int | None) -> Facts:
    """SIGKILL one rank (None: the lowest) below an instance's init. Return `rank` and `pid`.

    Raises FaultRefused if the rank does not run on the instance.
    """
    number, process = _rank(init_pid, rank)
    return {"rank": number, "pid": _kill(process)}


def kill_agent(init_pid: int) -> Facts:
    """SIGKILL the agent and return its `pid`. Its ranks keep training, and the user data restarts it.

    Raises FaultRefused if no agent runs on the instance.
    """
    return {"pid": _kill(_first(descendants(init_pid), is_agent, "agent"))}


def stop_rank(init_pid: int, rank: int | None) -> Facts:
    """SIGSTOP one rank (None: the lowest), which keeps its memory and its locks until `continue_stopped`.

    Return `rank`, `pid` and `start_ticks` in clock ticks since boot. Raises FaultRefused if the rank does not run on
    the instance.
    """
    number, process = _rank(init_pid, rank)
    if not process.send(signal.SIGSTOP):
        raise FaultRefused(f"rank {number} has just ended")
    return {"rank": number, "pid": process.pid, "start_ticks": process.start_ticks}


def continue_stopped(stopped: Iterable[Process]) -> list[int]:
    """Send SIGCONT to stopped processes that still exist, and return their pids."""
    return [process.pid for process in stopped if process.send(signal.SIGCONT)]


def corrupt_replica(init_pid: int, instance_id: str, rank: int | None, chance: random.Random) -> Facts:
    """Flip one bit of the newest complete copy of a shard in an instance's memory. Its agent receives no message.

    `rank` owns the shard; None means any rank that does not run on the instance. `chance` chooses byte and bit. Return
    `file`, `rank`, `step`, `offset` in the file, and the byte `before` and `after`. Raises FaultRefused if the instance
    holds no complete copy of such a shard.
    """
    here = {number for process in descendants(init_pid) if (number := rank_of(process.pid)) is not None}
    found = []
    for name, path in sorted(memory_of(memory_directory(instance_id)).items()):
        try:
            with path.open("rb") as file:
                header = unpack_header(file.read(HEADER_BYTES))
        except (ProtocolError, OSError):
            continue
        if (
            header.state is SlotState.SEALED
            and header.payload_bytes
            and (header.owner_rank == rank if rank is not None else header.owner_rank not in here)
        ):
            found.append((header.step, name, path, header))
    if not found:
        raise FaultRefused(f"{instance_id} holds no sealed replica{'' if rank is None else f' of rank {rank}'}")
    _, name, path, header = max(found, key=lambda one: one[:2])
    offset = HEADER_BYTES + chance.randrange(header.payload_bytes)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        before = os.pread(descriptor, 1, offset)[0]
        after = before ^ (1 << chance.randrange(8))
        os.pwrite(descriptor, bytes([after]), offset)
    finally:
        os.close(descriptor)
    return {
        "file": name,
        "rank": header.owner_rank,
        "step": header.step,
        "offset": offset,
        "before": before,
        "after": after,
    }


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """State of a GPU in the file that an agent reads in place of NVML."""

    index: int
    xids: tuple[int, ...] = ()
    ecc_uncorrectable: int = 0
    throttled: bool = False
    lost: bool = False


def nvml_file(directory: Path) -> Path:
    """Return an instance's NVML stub file (EVERSTEP_NVML_STUB)."""
    return directory / "nvml.json"


def write_gpus(directory: Path, gpus: Sequence[Gpu]) -> Path:
    """Set the GPU states that an instance's NVML stub reports."""
    path = nvml_file(directory)
    write_private(path, msgspec.json.encode({"gpus": gpus}))
    return path


def burn_in_file(directory: Path) -> Path:
    """Return the file that names the spoiled tests of an instance (EVERSTEP_BURN_IN_STUB)."""
    return directory / "spoiled_tests"


def spoil_test(directory: Path, test: str) -> Path:
    """Spoil a test of an instance from its agent's next burn-in on."""
    path = burn_in_file(directory)
    write_private(path, f"{path.read_text() if path.exists() else ''} {test}".encode())
    return path


def _rank(init_pid: int, rank: int | None) -> tuple[int, Process]:
    # `rank_of` also returns a number for child processes of a rank. The sort is stable and parents precede children, so
    # the rank itself comes first.
    running = [(number, process) for process in descendants(init_pid) if (number := rank_of(process.pid)) is not None]
    for number, process in sorted(running, key=lambda one: one[0]):
        if rank in (None, number):
            return number, process
    raise FaultRefused(
        f"rank {rank} does not run on this instance" if rank is not None else "no rank runs on this instance"
    )


def _first(processes: Iterable[Process], test: Callable[[int], bool], what: str) -> Process:
    for process in processes:
        if test(process.pid):
            return process
    raise FaultRefused(f"no {what} runs on this instance")


def _kill(process: Process) -> int:
    if not process.send(signal.SIGKILL):
        raise FaultRefused(f"process {process.pid} has just ended")
    wait_gone([process], timeout_seconds=GONE_SECONDS)
    return process.pid

"""Tests whether a node is fit to train: `python -P -m worker.node.burn_in LEVEL FOLDER`, a child of the agent.

    matmul           a product of integer matrices, which has a known digest
    disk-write       a file in FOLDER is written to the disk, then read from it and compared
    disk-read
    loopback         bytes pass through a TCP connection between two threads
    gpus             on EC2: NVML lists the GPUs of the instance type, and NVIDIA's fabric manager runs
    dcgm             on nodes with GPUs: `dcgmi diag -r LEVEL -j`
    gpu-matmul-0 …   on nodes with GPUs: `everstep.training.gpu_matmul`

With OWN_ADDRESS PARTNER_ADDRESS PORT PLACE, the only test is `all-reduce` (`everstep.training.all_reduce`).

The child prints its results as JSON. In a local cluster, the file that EVERSTEP_BURN_IN_STUB names contains the names
of tests that the child spoils.

Invariant: a test that cannot run to its end is UNKNOWN. Only a wrong result of the node's own hardware is FAILED.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from everstep.doctor.findings import Level
from everstep.doctor.node_checks import judge_node
from everstep.doctor.node_facts import node_facts
from everstep.host.firmware import is_ec2_instance
from everstep.protocol.agent_messages import BurnInOutcome, BurnInTest
from everstep.protocol.limits import cut
from worker.node.health.gpus import GpuReader, NvmlGpus, gpu_reader
from worker.node.network_cards import card_of
from worker.node.priority import end_first_without_memory, work_at

STUB_VARIABLE: Final = "EVERSTEP_BURN_IN_STUB"
SLOWED_BY: Final = 1000
MATMUL_SIZE: Final = 96
MATMUL_DIGEST: Final = "ba53cd05ab4a00ee0b32dc45ece9fb638d46fef9de4ce637fb5086bed0a245af"
"""SHA-256 of the product, as little-endian integers of 8 bytes."""
ROUNDS: Final = 5
"""Number of measurements of a rate. The best one counts, because other processes can slow down a measurement."""
ROUNDS_SECONDS: Final = 0.3
"""Time after which a test begins no further measurement, so that a slow disk gets one only."""
DISK_BYTES: Final = 4 << 20
LOOPBACK_BYTES: Final = 4 << 20
BLOCK_BYTES: Final = 256 << 10
LOOPBACK_SECONDS: Final = 10.0
DCGM_SECONDS: Final[Mapping[int, float]] = {1: 60.0, 2: 600.0, 3: 2700.0}
"""Time limit of DCGM by level. NVIDIA states durations below a minute, 2 minutes and 30 minutes."""
GPU_SECONDS: Final = 300.0
MAX_OUTPUT_BYTES: Final = 4 << 20
"""Longest output of a program that is parsed. DCGM prints some 100 KiB about eight GPUs."""
END_SECONDS: Final = 2.0
"""Time for DCGM to abort its diagnostics after SIGTERM, before it is killed."""
MAX_TEXT_CHARACTERS: Final = 500
_PR_SET_PDEATHSIG = 1
_GPU_CHECKS: Final = frozenset({"gpu count", "fabric manager"})
"""Checks of `everstep doctor --node` that concern hardware, and not the software of the image."""


class _DcgmResult(msgspec.Struct):
    status: str
    gpu_id: str | int = ""
    entity_id: str | int = ""


class _DcgmTest(msgspec.Struct):
    name: str
    results: list[_DcgmResult] = []


class _DcgmCategory(msgspec.Struct):
    category: str
    tests: list[_DcgmTest] = []


class _DcgmRun(msgspec.Struct):
    test_categories: list[_DcgmCategory]


class _GpuMatmul(msgspec.Struct):
    gpu: int
    is_right: bool
    rate: float


_DCGM: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DCGM_RUN: Final = msgspec.json.Decoder(_DcgmRun)
_GPU_MATMULS: Final = msgspec.json.Decoder(list[_GpuMatmul])
_DCGM_KEYS: Final = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
"""Keys of the results in the output of DCGM 4 and DCGM 3."""


def run(
    level: int,
    folder: Path,
    gpus: GpuReader,
    spoiled: frozenset[str] = frozenset(),
    dcgm_seconds: Mapping[int, float] = DCGM_SECONDS,
    pair: tuple[str, ...] = (),
) -> Iterator[BurnInTest]:
    """Yield the results of all tests of this node, at level 1 (seconds) to 3 (half an hour).

    Simulated GPUs are not tested. `spoiled` names the tests to spoil in a local cluster. With `pair`, the arguments of
    `all_reduce`, no other test runs.
    """
    tests: list[tuple[str, Callable[[], list[BurnInTest]]]] = [
        ("matmul", lambda: [matmul(error=int("matmul" in spoiled))]),
        ("disk-write", lambda: disk(folder)),
        ("loopback", lambda: [_result("loopback", rate=LOOPBACK_BYTES / _best(loopback))]),
    ]
    if is_ec2_instance():
        tests.append(("gpus", lambda: gpu_facts(gpus)))
    if isinstance(gpus, NvmlGpus):
        tests += [("dcgm", lambda: [dcgm(level, dcgm_seconds[level])]), ("gpu-matmul", gpu_matmuls)]
    if pair:
        tests = [("all-reduce", lambda: [all_reduce(*pair, error=int("all-reduce" in spoiled))])]
    for name, test in tests:
        for result in _attempt(name, test):
            is_slowed = result.name in spoiled and result.rate is not None
            yield msgspec.structs.replace(result, rate=(result.rate or 0) // SLOWED_BY) if is_slowed else result


def _attempt(name: str, test: Callable[[], list[BurnInTest]]) -> list[BurnInTest]:
    try:
        return test()
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError, RecursionError) as error:
        # EIO means that the device could not read or write a block.
        is_broken = isinstance(error, OSError) and error.errno == errno.EIO
        return [_result(name, f"{type(error).__name__}: {error}", is_unknown=not is_broken)]


def _result(name: str, text: str = "", *, rate: float | None = None, is_unknown: bool = False) -> BurnInTest:
    outcome = BurnInOutcome.UNKNOWN if is_unknown else BurnInOutcome.FAILED if text else BurnInOutcome.PASSED
    text = cut(text, MAX_TEXT_CHARACTERS)
    return BurnInTest(name=name, outcome=outcome, text=text, rate=None if rate is None else int(rate))


def matmul(size: int = MATMUL_SIZE, digest: str = MATMUL_DIGEST, *, error: int = 0) -> BurnInTest:
    """Multiply two matrices of small integers exactly, and add `error` to one element of the product."""
    left = [[float((i * 31 + j * 17 + i * j % 101) % 17 - 8) for j in range(size)] for i in range(size)]
    columns = list(zip(*left, strict=True))
    begun = time.perf_counter()
    product = [sum([a * b for a, b in zip(row, column, strict=True)]) for row in left for column in columns]
    seconds = time.perf_counter() - begun
    product[0] += error
    found = hashlib.sha256(b"".join(int(value).to_bytes(8, "little", signed=True) for value in product)).hexdigest()
    text = "" if found == digest else f"the product has the digest {found[:16]}, not {digest[:16]}"
    return _result("matmul", text, rate=2 * size**3 / seconds)


def disk(folder: Path) -> list[BurnInTest]:
    """Write a file to the disk, read it from there, and compare the content."""
    data = os.urandom(DISK_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:

        def write() -> None:
            file.seek(0)
            file.write(data)
            os.fsync(file.fileno())

        def read() -> None:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # Read from the disk, not from memory.
            file.seek(0)
            read_data[:] = file.read(DISK_BYTES)

        read_data = bytearray()
        writing, reading = _best(write), _best(read)
    text = "" if read_data == data else "the disk returned other bytes than were written"
    return [_result("disk-write", rate=DISK_BYTES / writing), _result("disk-read", text, rate=DISK_BYTES / reading)]


def loopback() -> None:
    """Send bytes through TCP to this node itself. Raises ConnectionResetError if the connection ends early."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LOOPBACK_SECONDS)
        with socket.create_connection(server.getsockname(), LOOPBACK_SECONDS) as sender, server.accept()[0] as receiver:
            receiver.settimeout(LOOPBACK_SECONDS)
            sending = threading.Thread(target=_send, args=(sender,), daemon=True)
            sending.start()
            block, left = bytearray(BLOCK_BYTES), LOOPBACK_BYTES
            while left:
                count = receiver.recv_into(block)
                if not count:
                    raise ConnectionResetError("the connection ended too early")
                left -= count
            sending.join()


def _send(sender: socket.socket) -> None:
    try:
        for _ in range(LOOPBACK_BYTES // BLOCK_BYTES):
            sender.sendall(bytes(BLOCK_BYTES))
    except OSError:
        sender.close()  # The receiver notices the end.


def _best(measured: Callable[[], None]) -> float:
    durations: list[float] = []
    while len(durations) < ROUNDS and sum(durations) < ROUNDS_SECONDS:
        begun = time.perf_counter()
        measured()
        durations.append(time.perf_counter() - begun)
    return min(durations)


def gpu_facts(gpus: GpuReader) -> list[BurnInTest]:
    """Compare the GPUs that NVML lists with the node's instance type."""
    facts = node_facts(gpu_count=len(gpus.read()))
    if facts.described is None:
        return [_result("gpus", "EC2 does not describe the instance type", is_unknown=True)]
    wrong = [each for each in judge_node(facts) if each.check in _GPU_CHECKS and each.level is Level.WRONG]
    return [_result("gpus", "; ".join(each.message for each in wrong), is_unknown=not isinstance(gpus, NvmlGpus))]


def dcgm(level: int, limit_seconds: float) -> BurnInTest:
    """Run DCGM's diagnostics, and return their result."""
    program = shutil.which("dcgmi")
    if program is None:
        return _result("dcgm", "dcgmi is not installed", is_unknown=True)
    return dcgm_result(output_of([program, "diag", "-r", str(level), "-j"], limit_seconds))


def dcgm_result(output: bytes) -> BurnInTest:
    """Return the result of DCGM's diagnostics from their JSON. Raises msgspec.MsgspecError for other output."""
    sections = _DCGM.decode(output)
    section = next((sections[key] for key in _DCGM_KEYS if key in sections), msgspec.Raw(b"{}"))
    failures: list[str] = []
    statuses: set[str] = set()
    for category in _DCGM_RUN.decode(section).test_categories:
        # The category Deployment checks the software of the image, so another instance would fail as well.
        is_of_image = category.category == "Deployment"
        for test in category.tests:
            for each in test.results:
                status = each.status.lower()
                statuses.add("skip" if is_of_image and status == "fail" else status)
                if status == "fail" and not is_of_image:
                    failures.append(f"{test.name} on GPU {each.gpu_id if each.gpu_id != '' else each.entity_id}")
    if failures:
        return _result("dcgm", f"failed: {', '.join(failures)}")
    return _result("dcgm") if "pass" in statuses else _result("dcgm", "no test has passed or failed", is_unknown=True)


def gpu_matmuls() -> list[BurnInTest]:
    """Multiply matrices with a known digest on each GPU."""
    output = output_of([sys.executable, "-P", "-m", "everstep.training.gpu_matmul"], GPU_SECONDS)
    return [
        _result(f"gpu-matmul-{each.gpu}", "" if each.is_right else "the product has a wrong digest", rate=each.rate)
        for each in _GPU_MATMULS.decode(output)
    ]


def all_reduce(own: str, partner: str, port: str, place: str, *, error: int = 0) -> BurnInTest:
    """Sum a tensor with another node. A failure is evidence against the pair, not against one of its nodes."""
    card = card_of(own)
    environment = {"GLOO_SOCKET_IFNAME": card, "NCCL_SOCKET_IFNAME": f"={card}"} | os.environ if card else None
    address = own if place == "0" else partner
    command = [sys.executable, "-P", "-m", "everstep.training.all_reduce", place, address, port, str(error)]
    # `output_of` limits the size of files, but NCCL's ranks share large ones.
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=GPU_SECONDS, check=False, env=environment
    )
    lines = re.findall(r"^(?:met|wrong|rate \d+)$", done.stdout.decode(errors="replace"), re.MULTILINE)
    if "met" not in lines:
        return _result("all-reduce", "the nodes did not connect", is_unknown=True)
    if "wrong" in lines:
        return _result("all-reduce", "the sum is wrong")
    rate = int(lines[-1][5:]) if lines[-1].startswith("rate") else None
    return _result("all-reduce", "the sum did not end" if rate is None else "", rate=rate)


def output_of(command: list[str], seconds: float) -> bytes:
    """Return the stdout of a program. Raises OSError if it cannot start, subprocess.TimeoutExpired if it is slow."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL, preexec_fn=_bound
        )
        try:
            process.wait(seconds)
        finally:
            _end(process)
        output.seek(0)
        return output.read(MAX_OUTPUT_BYTES)


def _bound() -> None:
    """Limit the output of a program before its start. The kernel ends the program with its parent."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def spoiled_tests(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the tests to spoil. Empty outside a local cluster."""
    stub = environment.get(STUB_VARIABLE) if environment.get("EVERSTEP_LOCAL") == "1" else None
    try:
        return frozenset(Path(stub).read_text().split()) if stub else frozenset()
    except FileNotFoundError:
        return frozenset()


def main(level: int, folder: Path, *pair: str) -> None:
    """Test this node, or with the arguments `pair` its all-reduce with a partner, and print the results."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # `output_of` then ends its program.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    work_at(0 if level == 1 or pair else 19)  # A job may wait for level 1, and a partner for an all-reduce.
    end_first_without_memory()
    gpus = gpu_reader()
    try:
        results = list(run(level, folder, gpus, spoiled_tests(os.environ), pair=pair))
        sys.stdout.buffer.write(msgspec.json.encode(results))
    finally:
        gpus.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])

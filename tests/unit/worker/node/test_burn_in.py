"""The tests of a node: matmul, disk, loopback, and programs whose output may be hostile."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from everstep.protocol.agent_messages import BurnInOutcome, BurnInTest
from everstep.training import gpu_matmul
from worker.node import burn_in
from worker.node.health.gpus import NoGpus, NvmlGpus

FAILED, PASSED, UNKNOWN = BurnInOutcome.FAILED, BurnInOutcome.PASSED, BurnInOutcome.UNKNOWN
NAMES = ["matmul", "disk-write", "disk-read", "loopback"]


class FakeGpus(NvmlGpus):
    """GPUs of which only the number counts."""

    def __init__(self) -> None:
        """Open no driver."""


def outcomes(tests: list[BurnInTest]) -> dict[str, BurnInOutcome]:
    return {test.name: test.outcome for test in tests}


def dcgm_output(*results: tuple[str, str, str], key: str = "DCGM Diagnostic") -> bytes:
    """Return JSON as DCGM prints it, from pairs of a category, a status and a GPU."""
    categories = [
        {"category": category, "tests": [{"name": "Memory", "results": [{"status": status, "gpu_id": gpu}]}]}
        for category, status, gpu in results
    ]
    return json.dumps({"Driver Version Detected": "570", key: {"test_categories": categories}}).encode()


def test_a_healthy_node_passes_all_tests_of_the_cpu_form(tmp_path: Path) -> None:
    tests = list(burn_in.run(1, tmp_path, NoGpus()))
    assert outcomes(tests) == dict.fromkeys(NAMES, PASSED)
    assert all(test.rate for test in tests)
    assert list(tmp_path.iterdir()) == []


def test_a_spoiled_test_has_a_wrong_product_or_a_low_rate(tmp_path: Path) -> None:
    tests = {test.name: test for test in burn_in.run(1, tmp_path, NoGpus(), frozenset({"matmul", "loopback"}))}
    assert (tests["matmul"].outcome, tests["disk-write"].outcome) == (FAILED, PASSED)
    assert tests["loopback"].rate is not None
    assert tests["loopback"].rate < 1e8, "a thousandth of the rate of the fastest memory"


def test_only_a_local_cluster_spoils_tests(tmp_path: Path) -> None:
    stub = tmp_path / "stub"
    environment = {burn_in.STUB_VARIABLE: str(stub), "EVERSTEP_LOCAL": "1"}
    assert burn_in.spoiled_tests(environment) == frozenset()
    stub.write_text("matmul loopback")
    assert burn_in.spoiled_tests(environment) == {"matmul", "loopback"}
    assert burn_in.spoiled_tests({burn_in.STUB_VARIABLE: str(stub)}) == frozenset()


@pytest.mark.parametrize(("number", "outcome"), [(errno.EIO, FAILED), (errno.ENOSPC, UNKNOWN), (errno.EACCES, UNKNOWN)])
def test_only_an_error_of_the_device_speaks_against_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, outcome: BurnInOutcome
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    assert outcomes(list(burn_in.run(1, tmp_path, NoGpus())))["disk-write"] is outcome


def test_a_disk_that_returns_other_bytes_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: os.pwrite(file, b"damaged", 1000))
    assert outcomes(burn_in.disk(tmp_path)) == {"disk-write": PASSED, "disk-read": FAILED}


@pytest.mark.parametrize("key", ["DCGM Diagnostic", "DCGM GPU Diagnostic"])
def test_a_failed_test_of_dcgm_names_the_gpu(key: str) -> None:
    output = dcgm_output(("Hardware", "Pass", "0"), ("Hardware", "Fail", "3"), ("Deployment", "Fail", "1"), key=key)
    found = burn_in.dcgm_result(output)
    assert (found.outcome, found.text) == (FAILED, "failed: Memory on GPU 3")


@pytest.mark.parametrize(
    ("results", "outcome"),
    [
        ([("Hardware", "Pass", "0"), ("Hardware", "Skip", "0")], PASSED),
        ([("Hardware", "Pass", "0"), ("Deployment", "Fail", "0")], PASSED),
        ([("Hardware", "Warn", "0")], UNKNOWN),
        ([("Deployment", "Fail", "0")], UNKNOWN),
        ([], UNKNOWN),
    ],
)
def test_skipped_tests_and_the_software_of_the_image_are_no_evidence(
    results: list[tuple[str, str, str]], outcome: BurnInOutcome
) -> None:
    assert burn_in.dcgm_result(dcgm_output(*results)).outcome is outcome


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        "echo 'Error: unable to connect to the host engine'",
        "echo '{}'",
        "echo '[1]'",
        'echo \'{"DCGM Diagnostic": {"test_categories": [{"category": 7}]}}\'',
        'echo \'{"DCGM Diagnostic": {"test_categories": {}}}\'',
        "head -c 100000 /dev/zero | tr '\\0' '['",
        "echo '{\"a\":'; head -c 100000 /dev/zero | tr '\\0' '['",
        "exec cat /dev/zero",
        "exec sleep 1000",
    ],
    ids=["fails", "words", "empty", "list", "category", "object", "deep", "deeper", "huge", "hangs"],
)
def test_hostile_output_of_dcgm_is_no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = tmp_path / "dcgmi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    limits = {1: 0.5 if "sleep" in script else 60.0}
    monkeypatch.setattr(burn_in, "gpu_matmuls", list)
    assert outcomes(list(burn_in.run(1, tmp_path, FakeGpus(), dcgm_seconds=limits)))["dcgm"] is UNKNOWN


def test_without_dcgm_nothing_speaks_against_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert burn_in.dcgm(1, 60.0).outcome is UNKNOWN


def test_each_gpu_has_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = b'[{"gpu": 0, "is_right": true, "rate": 4e14}, {"gpu": 1, "is_right": false, "rate": 4e14}]'
    monkeypatch.setattr(burn_in, "output_of", lambda *_: printed)
    assert outcomes(burn_in.gpu_matmuls()) == {"gpu-matmul-0": PASSED, "gpu-matmul-1": FAILED}


def test_a_program_ends_with_its_output_or_its_time() -> None:
    assert burn_in.output_of([sys.executable, "-c", "print(5)"], 60) == b"5\n"
    with pytest.raises(subprocess.TimeoutExpired):
        burn_in.output_of(["sleep", "1000"], 0.1)


def test_the_product_of_the_gpu_form_is_exact() -> None:
    is_right, rate = gpu_matmul.measure(torch.device("cpu"), 256, repeats=1)
    assert is_right
    assert rate > 0


@pytest.mark.parametrize(
    ("printed", "outcome", "rate"),
    [
        (b"", UNKNOWN, None),
        (b"Traceback\nrate 5", UNKNOWN, None),
        (b"met\n", FAILED, None),
        (b"met\nwrong\n", FAILED, None),
        (b"met\nwrong\nrate 5\n", FAILED, None),
        (b"a warning of NCCL: rate 7\nmet\nrate 5\n\xff", PASSED, 5),
    ],
)
def test_an_all_reduce_fails_only_after_both_nodes_are_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: bytes, outcome: BurnInOutcome, rate: int | None
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command[4:])
        return subprocess.CompletedProcess(command, 0, printed)

    monkeypatch.setattr(subprocess, "run", run)
    for place in ("0", "1"):
        (test,) = burn_in.run(3, tmp_path, NoGpus(), pair=("127.0.0.1", "127.0.0.2", "20000", place))
        assert (test.name, test.outcome, test.rate) == ("all-reduce", outcome, rate)
    assert commands == [["0", "127.0.0.1", "20000", "0"], ["1", "127.0.0.2", "20000", "0"]]


def test_the_child_prints_what_the_agent_decodes(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "worker.node.burn_in", "1", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=True)
    assert outcomes(msgspec.json.decode(done.stdout, type=list[BurnInTest])) == dict.fromkeys(NAMES, PASSED)

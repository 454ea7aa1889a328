"""Tests the benchmark of a device, such as a GPU.

The measurements run on a fake device that executes each operation as late as possible.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.device import __main__ as command
from benchmarks.device import parts, report, rows
from benchmarks.device.parts import CAPTURE, GIB, GPT, GRAPH, PARTS, QUICK, RESTORE, Sizes, run_part
from benchmarks.device.rank import copying, graph
from benchmarks.device.rank.hardware import Host, Registration, WatchedDevice
from benchmarks.device.rank.state import BYTES_A_PARAMETER, Slot, State, shapes
from benchmarks.device.report import PAGE, Outcome, Run
from benchmarks.errors import BenchmarkFailed
from benchmarks.measures import Verdict
from benchmarks.page import render, write
from everstep.training.copier import Copier
from everstep.training.cuda_copier import CopySizes, CudaCopier
from everstep.training.cuda_device import CudaDevice
from tests.unit.benchmarks.machine import MACHINE
from tests.unit.training.test_cuda_copier import FakeDevice

DEVICE = {
    "name": "G",
    "memory_gib": 80.0,
    "cuda": "13.0",
    "torch": "2.11",
    "driver": "580",
    "pcie_generation": "5",
    "pcie_lanes": "16",
}
SIZE = 300_000
Found = dict[str, Any]


class Lagging(FakeDevice):
    """The fake device of the copier's tests, as an object that the benchmark can measure like a real device."""

    def __init__(self, registration: Registration, gate: Callable[[], object]) -> None:
        super().__init__()
        self.registration = registration
        self.gate = gate

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() > 0  # Adam's step counts stay in host memory

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.gate()
        super().copy(target, source)

    def register(self, address: int, size: int) -> bool:
        is_taken = super().register(address, size)
        self.registration.add(size, 0.001, is_taken=is_taken)
        return is_taken


SMALL_SIZES = CopySizes(piece_bytes=32 * 1024, gather_bytes=16 * 1024, registered_bytes=64 * 1024)


def lagging(limit: int = 1 << 40) -> Host:
    def make(registration: Registration, gate: Callable[[], object]) -> Copier:
        device = Lagging(registration, gate)
        device.limit = limit
        return CudaCopier(device, SMALL_SIZES)

    return Host(make)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PINNED_BYTES", 64 * 1024)
    monkeypatch.setattr(graph, "WIDTH", 16)
    monkeypatch.setattr(graph, "BATCH", 4)


# -- tests of measurements


@pytest.mark.parametrize("size", [1, 100_000, 3 * 10**6, 8 * GIB])
def test_a_state_has_the_size_that_was_asked_for_and_small_tensors(size: int) -> None:
    elements = [torch.Size(shape).numel() for shape in shapes(size)]
    assert size <= BYTES_A_PARAMETER * sum(elements) < size * 1.01 + BYTES_A_PARAMETER * 2048
    if size == 8 * GIB:
        assert sum(count <= 4096 for count in elements) >= 1000


def test_captures_are_made_by_the_ring_then_registered_and_every_byte_is_compared(tmp_path: Path) -> None:
    found: Any = copying.capture(lagging(), SIZE, 3, tmp_path)
    assert "failure" not in found
    assert len(found["bounce"]["seconds"]) == 4
    assert len(found["registered"]["seconds"]) == len(found["floor"]["seconds"]) == 3
    assert found["bounce"]["equal"] == found["registered"]["equal"] == found["fresh"]["equal"] == [True]
    assert found["registration"]["bytes"] == found["cold_registration"]["bytes"] > SIZE
    told = {row.what: row for row in rows.of_part(CAPTURE, found)}
    assert told["capture into a registered slot"].verdict is Verdict.INCONCLUSIVE, (
        "of a state that is too small, whatever the rate"
    )


def test_a_capture_of_the_wrong_bytes_is_seen(tmp_path: Path) -> None:
    state = State(torch.device("cpu"), SIZE)
    slot = Slot(tmp_path / "slot", state)
    with closing(Host().copier(Registration())) as copier:
        copying._capture(Host(), copier, slot, copying.Captures())
    assert slot.is_equal()
    with torch.no_grad():
        state.model[0].view(torch.int32)[0] += 1
    assert not slot.is_equal()


def test_what_was_measured_before_a_refused_registration_is_kept(tmp_path: Path) -> None:
    found: Any = copying.capture(lagging(limit=100_000), SIZE, 2, tmp_path)
    assert "were refused" in found["failure"]
    told = rows.of_part(CAPTURE, found)
    assert {row.what for row in told} >= {
        "capture through the bounce ring, nothing registered",
        "the part capture ran to its end",
    }
    assert told[-1].verdict is Verdict.SHORT


def test_restores_go_the_sessions_way_and_bring_back_what_was_forgotten(tmp_path: Path) -> None:
    found: Any = copying.restore(lagging(), SIZE, 2, tmp_path)
    assert found["equal"] == [True, True, True]
    assert len(found["seconds"]) == len(found["floor"]["seconds"]) == 2
    assert rows.of_part(RESTORE, found)[0].verified is True


def test_a_restore_that_brings_nothing_back_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slot, "restore", lambda _self: (0.0, 0.0))
    found: Any = copying.restore(lagging(), SIZE, 1, tmp_path)
    assert found["equal"] == [False, False]
    assert rows.of_part(RESTORE, {**found, "mapping_seconds": [0.1]})[0].verdict is Verdict.SHORT


def test_the_copy_is_held_until_the_graph_is_being_captured_and_is_over_before_it_ends(tmp_path: Path) -> None:
    order: list[str] = []

    class Watched(Host):
        def graph(
            self, step: Callable[[], object], during: Callable[[], object], *, warm_up: int
        ) -> Callable[[], object]:
            def watched() -> None:
                order.append("begun")
                during()
                order.append("over")

            return super().graph(step, watched, warm_up=warm_up)

    def make(registration: Registration, gate: Callable[[], object]) -> Copier:
        def noted() -> None:
            gate()
            order.append("copy")

        return CudaCopier(Lagging(registration, noted), SMALL_SIZES)

    found: Any = graph.survives(Watched(make), SIZE, 2, tmp_path)
    assert order[0] == "begun"
    assert "copy" in order[1 : order.index("over")]
    assert (found["was_in_flight"], found["copy_error"], found["slot_equal"], found["torn"]) == (True, "", True, 0)
    assert [row.verdict for row in rows.of_part(GRAPH, found)] == [Verdict.PASS, Verdict.PASS]


def test_the_real_device_is_watched_while_it_registers_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    registration, gated = Registration(), []
    monkeypatch.setattr(CudaDevice, "register", lambda _self, _address, size: size < 100)
    monkeypatch.setattr(CudaDevice, "copy", lambda _self, _target, _source: gated.append("copy"))
    device = WatchedDevice(0, registration, lambda: gated.append("gate"))
    assert device.register(0, 50)
    assert not device.register(50, 100)
    assert (registration.registered_bytes, registration.refused_bytes) == (50, 100)
    device.copy(torch.zeros(1), torch.zeros(1))
    assert gated == ["gate", "copy"]
    registration.wait(50)
    with pytest.raises(RuntimeError, match="locked memory"):
        registration.wait(51)


def test_waiting_for_registration_ends_when_the_last_piece_is_there() -> None:
    registration = Registration()
    waiter = threading.Thread(target=registration.wait, args=(30,))
    waiter.start()
    for _ in range(3):
        registration.add(10, 0.1, is_taken=True)
    waiter.join(10)
    assert not waiter.is_alive()


# -- tests of verdicts: whether a value meets its limit


def captured(
    seconds: float,
    floors: tuple[float, ...] = (0.2,) * 4,
    *,
    equal: bool = True,
    allocations: int = 0,
    size: int = 8 * GIB,
) -> Found:
    kind = {
        "seconds": [seconds] * 4,
        "begin_seconds": [0.001] * 4,
        "wait_seconds": [0.002] * 4,
        "cpu_seconds": [0.1] * 4,
        "allocation_count": allocations,
        "equal": [equal],
    }
    return {
        "payload_bytes": size,
        "tensors": 9,
        "registered": kind,
        "bounce": kind,
        "floor": {"bytes": 8 * GIB, "seconds": list(floors)},
    }


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (captured(0.22), Verdict.PASS),
        (captured(0.23), Verdict.SHORT),
        (captured(0.23, (0.2, 0.2, 0.25, 0.25)), Verdict.INCONCLUSIVE),
        (captured(0.22, size=8 * GIB - 1), Verdict.INCONCLUSIVE),
        (captured(0.22, (0.2, 0.2, 0.25, 0.25), equal=False), Verdict.SHORT),
    ],
)
def test_a_capture_is_held_against_pinned_memory(found: Found, verdict: Verdict) -> None:
    row = rows.of_part(CAPTURE, found)[0]
    assert row.what == "capture into a registered slot"
    assert row.verdict is verdict


def test_a_capture_rate_whose_interval_contains_the_limit_is_inconclusive() -> None:
    found = captured(0.21)
    found["registered"] = {**found["registered"], "seconds": [0.21, 0.24, 0.21, 0.21]}
    row = rows.of_part(CAPTURE, found)[0]
    assert (row.verdict, row.reason) == (Verdict.INCONCLUSIVE, "the interval has the limit in it")


def test_a_copier_that_asks_for_memory_falls_short() -> None:
    judged = {
        row.what: row.verdict for row in rows.of_part(CAPTURE, captured(0.22, allocations=1)) if "requests" in row.what
    }
    assert set(judged.values()) == {Verdict.SHORT}
    assert len(judged) == 2


def trained(
    slower: float = 1.0, *, commits: int = 24, noise: float = 0.0, plain: tuple[float, ...] = (1.0,) * 8, torn: int = 0
) -> Found:
    order = "ABBA" * 4
    rest = iter(plain)
    blocks = [
        [slower + noise * (number % 3), slower] if letter == "A" else [next(rest)] * 2
        for number, letter in enumerate(order)
    ]
    verified = {"steps": [1, 2], "committed": [1, 2], "equal": [1, 2][torn:], "torn": [1, 2][:torn], "unseen": []}
    return {
        "order": order,
        "step_seconds": blocks,
        "kept_steps": 24,
        "commits": commits,
        "blocked_seconds": [0.001, 0.002],
        "synchronizations": [],
        "verified": verified,
    }


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (trained(1.009), Verdict.PASS),
        (trained(1.011), Verdict.SHORT),
        (trained(1.005, noise=0.02), Verdict.INCONCLUSIVE),
        (trained(1.0, commits=22), Verdict.SHORT),
        (trained(1.0, commits=23), Verdict.PASS),
        (trained(1.0, plain=(1.0,) * 7 + (1.3,)), Verdict.INCONCLUSIVE),
        ({**trained(1.0), "order": "AB", "step_seconds": [[1.0], [1.0]]}, Verdict.INCONCLUSIVE),
    ],
)
def test_a_step_may_cost_a_hundredth_by_the_intervals_upper_end_and_only_if_steps_are_kept(
    found: Found, verdict: Verdict
) -> None:
    row, commits = rows.of_part(GPT, found)[:2]
    assert row.verdict is verdict, row
    assert commits.verdict is (Verdict.PASS if found["commits"] >= 23 else Verdict.SHORT)


def test_one_torn_step_falls_short_and_one_that_nobody_saw_decides_nothing() -> None:
    assert rows.whole(trained()["verified"]).verdict is Verdict.PASS
    torn = rows.whole(trained(torn=1)["verified"])
    assert (torn.verdict, torn.verified) == (Verdict.SHORT, False)
    unseen = {**trained()["verified"], "equal": [1], "unseen": [2]}
    assert rows.whole(unseen).verdict is Verdict.INCONCLUSIVE
    assert (
        rows.whole({**unseen, "steps": [1], "committed": [], "equal": [], "unseen": []}).verdict is Verdict.INCONCLUSIVE
    )


def test_a_call_that_waited_for_the_device_falls_short_and_is_named() -> None:
    row = rows.of_part(GPT, {**trained(), "synchronizations": ["a.py:3", "a.py:3"]})[2]
    assert (row.verdict, row.value, row.reason) == (Verdict.SHORT, 2, "a.py:3")


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, Verdict.PASS),
        ({"was_in_flight": False}, Verdict.INCONCLUSIVE),
        ({"copy_error": "refused"}, Verdict.SHORT),
        ({"slot_equal": False}, Verdict.SHORT),
        ({"weights_differ": 0.1}, Verdict.SHORT),
    ],
)
def test_a_graph_survives_if_copy_and_graph_are_right_and_were_there_together(change: Found, verdict: Verdict) -> None:
    found = {
        "was_in_flight": True,
        "copy_error": "",
        "slot_equal": True,
        "weights_differ": 0.0,
        "tolerance": 1e-4,
        "replays": 4,
        "kept": 2,
        "torn": 0,
    }
    assert rows.of_part(GRAPH, {**found, **change})[0].verdict is verdict


# -- parts of the benchmark, and their outcomes


def cuda(found: Found) -> Outcome:
    return Outcome(found={"device": "cuda", **found}, at="2026-01-02 03:04 UTC", seconds=9.0)


def test_a_part_that_fails_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(part: str, *_: object) -> Found:
        if part == CAPTURE:
            raise ModuleNotFoundError("No module named 'moto'")
        return {"device": "cuda", **(trained() if part == GPT else {})}

    monkeypatch.setattr(command, "probe", lambda: DEVICE)
    monkeypatch.setattr(command, "run_one", measure)
    code = command.main(
        [
            "--only",
            CAPTURE,
            GRAPH,
            GPT,
            "--json",
            str(tmp_path / "device.json"),
            "--document",
            str(tmp_path / "page.md"),
        ]
    )
    assert code == 2
    page = (tmp_path / "page.md").read_text()
    assert "ModuleNotFoundError: No module named 'moto'" in page
    assert "what it left cannot be read (KeyError" in page, "a part that ended early"
    assert "did not run or failed: Restore" in " ".join(page.split())
    assert "pass: commits ÷ steps 1.00" in page
    monkeypatch.setattr(
        command, "run_one", lambda part, *_: {"device": "cuda", **(captured(0.21) if part == CAPTURE else {})}
    )
    command.main(["--only", CAPTURE, "--json", str(tmp_path / "device.json"), "--document", str(tmp_path / "page.md")])
    page = (tmp_path / "page.md").read_text()
    assert "moto" not in page
    assert "pass: commits ÷ steps 1.00" in page, "what an earlier run on this device measured stays"
    assert "capture into a registered slot" in page


def test_without_a_device_nothing_is_reported_and_one_sentence_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.fail("this test is of a machine without a device")
    code = command.main(["--json", str(tmp_path / "device.json"), "--document", str(tmp_path / "page.md")])
    said = capsys.readouterr().err.strip()
    assert code == 1
    assert said.startswith("the benchmark failed: there is no device to measure: torch")
    assert "Use a machine with an NVIDIA GPU" in said
    assert list(tmp_path.iterdir()) == []


def run_of(outcomes: dict[str, Outcome], *, is_quick: bool = False) -> Run:
    return Run(machine=MACHINE, device=DEVICE, sizes=Sizes(), outcomes=outcomes, is_quick=is_quick, seconds=9.0)


def test_a_part_that_ran_on_the_host_is_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "probe", lambda: DEVICE)
    monkeypatch.setattr(command, "run_one", lambda *_: {"device": "cpu"})
    results, page = tmp_path / "device.json", tmp_path / "page.md"
    assert command.main(["--only", GRAPH, "--json", str(results), "--document", str(page)]) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("device", "sizes", "revision", "is_quick"),
    [
        ({"driver": "590"}, {}, "a", False),
        ({"name": "H"}, {}, "a", False),
        ({"torch": "2.13"}, {}, "a", False),
        ({}, {"layers": 3}, "a", False),
        ({}, {}, "b", False),
        ({}, {}, "a", True),
    ],
    ids=["driver", "device", "torch", "sizes", "revision", "quick"],
)
def test_results_of_another_device_size_or_revision_are_not_kept(
    tmp_path: Path, device: Found, sizes: dict[str, int], revision: str, *, is_quick: bool
) -> None:
    path, machine = tmp_path / "device.json", dataclasses.replace(MACHINE, revision="a")
    run = dataclasses.replace(run_of({CAPTURE: cuda(captured(0.21))}), machine=machine)
    write(PAGE, run, path, tmp_path / "page.md")
    assert report.earlier(path, DEVICE, Sizes(), machine, is_quick=False) == run.outcomes
    other = dataclasses.replace(machine, revision=revision)
    changed = dataclasses.replace(Sizes(), **sizes)
    assert report.earlier(path, {**DEVICE, **device}, changed, other, is_quick=is_quick) == {}
    assert report.earlier(tmp_path / "none.json", DEVICE, Sizes(), machine, is_quick=False) == {}


RUN = run_of(
    {
        CAPTURE: cuda(captured(0.21)),
        GPT: cuda({**trained(), "parameters": 2 * 10**8, "state_bytes": 2 * GIB, "tokens": 262144}),
    }
)


def test_the_page_names_the_device_and_has_its_values() -> None:
    page = " ".join(render(PAGE, dataclasses.replace(RUN, is_quick=True)).split())
    assert "Device: G, 80.0 GiB, driver 580, PCIe generation 5 with 16 lanes" in page
    assert "Every value on this page was measured on this device." in page
    assert "200 M parameters in fp32 under Adam, 2.00 GiB, 262,144 tokens per step" in page
    assert "count for nothing" in page
    assert "≥ 36 GiB/s, 0.9 × pinned memory's 40.0" in page
    assert {row.verdict for row in report.rows(RUN)} == {Verdict.PASS, Verdict.NONE}


def test_sizes_are_arguments() -> None:
    def parsed(*argv: str) -> Sizes:
        parser = argparse.ArgumentParser()
        parser.add_argument("--quick", action="store_true")
        command.options(parser)
        return command.sizes_of(parser.parse_args(argv))

    assert parsed() == Sizes()
    assert Sizes().state_bytes == rows.LEAST_STATE_BYTES == 8 * GIB
    assert parsed("--quick", "--layers", "3") == dataclasses.replace(QUICK, layers=3)
    assert parsed("--gib", "0.5", "--order", "AB") == dataclasses.replace(Sizes(), state_bytes=GIB // 2, order="AB")


def test_a_part_that_lacks_room_says_how_much_it_needs(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkFailed, match=r"GiB left and the part capture needs"):
        run_part(CAPTURE, dataclasses.replace(Sizes(), state_bytes=1 << 50), tmp_path, device="cpu")


@pytest.mark.integration
def test_a_part_runs_in_a_process_of_its_own_and_tells_how_it_ended(tmp_path: Path) -> None:
    small = dataclasses.replace(Sizes(), state_bytes=SIZE, graph_bytes=SIZE, rounds=1, replays=1)
    found = run_part(RESTORE, small, tmp_path, device="cpu")
    assert (found["device"], found["equal"]) == ("cpu", [True, True])
    with pytest.raises(
        BenchmarkFailed, match=r"ended with 1: RuntimeError: torch sees no CUDA device; see .*restore.log"
    ):
        run_part(RESTORE, small, tmp_path, device="cuda")
    with pytest.raises(BenchmarkFailed, match="has not ended after"):
        run_part(RESTORE, dataclasses.replace(small, part_seconds=0.01), tmp_path, device="cpu")
    assert not (parts.MEMORY / f"everstep-bench-device-{os.getpid()}").exists()


def test_every_part_has_a_title_and_a_place() -> None:
    assert set(report.TITLES) == set(PARTS)

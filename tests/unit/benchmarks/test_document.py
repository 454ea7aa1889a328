"""What all reports have in common."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.document import BenchmarkRun, caveats, judged, opening, write_figures
from benchmarks.machine import Machine

MACHINE = Machine(
    processor="P",
    cores=2,
    memory_gib=8.0,
    kernel="Linux 6",
    python="3.11",
    versions={"torch": "2.13.0", "moto": "5.2.5"},
    load_average=(0.96, 0.2, 0.345),
)


@dataclass(frozen=True)
class Row:
    measured: float

    @property
    def falls_short(self) -> bool:
        return self.measured > 1


def test_a_page_begins_with_who_wrote_it_and_where_its_figures_are() -> None:
    run = BenchmarkRun(machine=MACHINE, is_quick=False, seconds=61.7)
    written = "Written by `make bench-x` (62 s); every figure is in `.everstep/bench/x.json`."
    assert opening(run, "# X", "make bench-x", "x.json") == ["# X", "", written, ""]
    assert opening(run, "# X", "make bench-x", "x.json", preface="Before. ")[2] == f"Before. {written}"


def test_a_machine_is_told_with_the_versions_that_matter() -> None:
    assert MACHINE.words() == "P, 2 cores, 8.0 GiB, Linux 6, Python 3.11"
    assert MACHINE.words("moto", "torch") == "P, 2 cores, 8.0 GiB, Linux 6, Python 3.11, moto 5.2.5, torch 2.13.0"
    assert MACHINE.load == "0.96, 0.20, 0.34"


def test_only_a_quick_run_and_a_busy_machine_have_caveats() -> None:
    busy = replace(MACHINE, load_average=(1.01, 0.0, 0.0))
    assert caveats(MACHINE, is_quick=False) == []
    assert caveats(MACHINE, is_quick=True, quick="Few.", busy="Busy.") == ["", "**Few.**"]
    assert caveats(busy, is_quick=False, quick="Few.", busy="Busy.") == ["", "**Busy.**"]
    quick, late = caveats(busy, is_quick=True)[1::2]
    assert "measures nothing" in quick
    assert "more than 0.5 per core" in late


def test_figures_are_written_into_a_folder_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "bench" / "x.json"
    run = BenchmarkRun(machine=MACHINE, is_quick=True, seconds=1.0)
    write_figures(path, run.with_found(rows=judged([Row(1.0), Row(1.5)])))
    found = json.loads(path.read_text())
    assert (found["machine"]["versions"], found["is_quick"], found["seconds"]) == (MACHINE.versions, True, 1.0)
    assert found["rows"] == [{"measured": 1.0, "falls_short": False}, {"measured": 1.5, "falls_short": True}]

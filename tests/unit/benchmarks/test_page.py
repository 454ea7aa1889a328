"""Every page is a pure function of its stored results and of its template."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.__main__ import PAGES
from benchmarks.machine import Machine
from benchmarks.measures import Verdict
from benchmarks.page import (
    PLACEHOLDER,
    TEMPLATES,
    BenchmarkRun,
    Page,
    fill,
    load,
    render,
    render_again,
    with_section,
    write,
)
from benchmarks.rows import Row, limits, line, number, table, without_verdicts
from tests.unit.benchmarks import (
    test_api,
    test_dashboard,
    test_data_plane,
    test_device,
    test_durable,
    test_faults,
    test_first,
    test_integrations,
    test_interleave,
    test_interruption,
    test_parity,
    test_scale,
)
from tests.unit.benchmarks.machine import MACHINE

RUNS: dict[str, BenchmarkRun] = {
    "api": test_api.GOOD,
    "dashboard": test_dashboard.RUN,
    "data-plane": test_data_plane.RUN,
    "device": test_device.RUN,
    "durable": test_durable.RUN,
    "faults": test_faults.RUN,
    "first": test_first.RUN,
    "integrations": test_integrations.RUN,
    "interleave": test_interleave.RUN,
    "parity": test_parity.RUN,
    "recovery": test_interruption.RUN,
    "scale": test_scale.RUN,
}
OPTIONAL = {"caveats", "job_uploads", "loads", "missing", "peer_notes", "remeasured", "restores"}
"""Placeholders whose text only some runs supply."""
BUSY = replace(MACHINE, load_average=(1.01, 0.0, 0.0))


@dataclass(frozen=True, kw_only=True)
class Timed(BenchmarkRun):
    """Results of a benchmark that measures a single value."""

    milliseconds: float


def of(run: Timed) -> list[Row]:
    row = Row(what="a call", value=run.milliseconds, unit="ms", limit=2.0).judged()
    return without_verdicts([row]) if run.is_busy else [row]


PAGE = Page(name="x", command="make bench-x", run=Timed, values=lambda run: {"limits": limits(of(run))}, rows=of)
RUN = Timed(machine=MACHINE, is_quick=False, seconds=61.7, milliseconds=1.5)


# -- tests of stored results


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.parametrize("machine", [MACHINE, BUSY], ids=["quiet", "busy"])
def test_stored_results_give_the_same_page_and_picture_again(page: Page, machine: Machine, tmp_path: Path) -> None:
    run = replace(RUNS[page.name], machine=machine)
    results, document = tmp_path / "x.json", tmp_path / "x.md"
    write(page, run, results, document)
    written = document.read_text()
    assert written == render(page, run, results="x.json")
    assert render(page, load(page, results), results="x.json") == written
    picture = page.draw(run)
    assert (tmp_path / "x.svg").exists() is (picture is not None)
    assert page.draw(load(page, results)) == picture
    document.unlink()
    render_again(page, results, document)
    assert document.read_text() == written


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_stored_page_is_the_page_of_its_stored_results(page: Page) -> None:
    if page.results.exists():
        before = page.document.read_text()
        assert render(page, load(page, page.results), before) == before
        picture = page.draw(load(page, page.results))
        assert picture is None or page.results.with_suffix(".svg").read_text() == picture


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_stored_page_has_the_words_of_its_template(page: Page) -> None:
    """A stored page contains the text of its template, so that both must change together.

    The page lacks the sections of parts that the stored run did not measure.
    """
    if not page.document.exists():
        pytest.skip("no machine has measured this page")
    stored = " ".join(page.document.read_text().split())
    values = page.values(load(page, page.results)) if page.results.exists() else {}
    is_omitted = False
    for block in page.template.strip().split("\n\n"):
        if block.startswith("## "):
            parts = [name for _, name, _ in PLACEHOLDER.findall(block)]
            is_omitted = any(name in values and values[name] is None for name in parts)
            # Without stored results, the page itself shows whether a part was measured.
            is_omitted = is_omitted or bool(parts and not values and block.split(" {")[0] not in stored)
        if is_omitted:
            continue
        for item in re.split(r"\n(?=- )", block):
            names = {name for _, name, _ in PLACEHOLDER.findall(item)}
            words = [" ".join(part.split()) for part in PLACEHOLDER.split(item)[:: PLACEHOLDER.groups + 1]]
            if not PLACEHOLDER.search(item):
                assert words[0] in stored
            elif any(words) and not names & OPTIONAL:
                pattern = r" ?[^|]{0,900}? ?".join(map(re.escape, words))
                assert re.search(pattern, stored), item


def test_every_benchmark_has_a_template_and_a_page() -> None:
    assert sorted(path.stem for path in TEMPLATES.iterdir()) == sorted(page.name for page in PAGES) == sorted(RUNS)


# -- tests of page templates


def test_a_block_without_a_text_is_left_out() -> None:
    template = "# X\n\n- a: {a}.\n- b: {b}\n  and more.\n\n{c}\n\nAlways."
    assert fill(template, {"a": "1", "b": None, "c": None}) == "# X\n\n- a: 1.\n\nAlways.\n"
    assert fill(template, {"a": None, "b": "2", "c": "3"}) == "# X\n\n- b: 2 and more.\n\n3\n\nAlways.\n"


def test_a_heading_decides_on_its_section() -> None:
    template = "# X\n\n## A {a?}\n\nWords.\n\n### Part\n\n{b}\n\n## B {b?}\n\nMore {b}."
    assert fill(template, {"a": None, "b": "1"}) == "# X\n\n## B\n\nMore 1.\n"
    assert fill(template, {"a": "", "b": None}) == "# X\n\n## A\n\nWords.\n\n### Part\n"


def test_a_section_is_replaced_in_its_place() -> None:
    document = with_section(with_section("", "make a", "one"), "make b", "two")
    renewed = with_section(document, "make a", "three")
    assert renewed.index("three") < renewed.index("two")
    assert "one" not in renewed
    assert with_section(renewed, "make a", "three") == renewed


@pytest.mark.parametrize(
    ("machine", "is_quick", "texts"),
    [
        (MACHINE, False, []),
        (MACHINE, True, ["count for nothing"]),
        (BUSY, False, ["load above 0.5 per core"]),
        (BUSY, True, ["count for nothing", "load above 0.5 per core"]),
    ],
)
def test_a_quick_run_and_a_busy_machine_have_caveats(
    machine: Machine, texts: list[str], monkeypatch: pytest.MonkeyPatch, *, is_quick: bool
) -> None:
    monkeypatch.setattr(Page, "template", "# X\n\n{written}\n\n{caveats}")
    written = "Written by `make bench-x` in 62 s from [benchmarks-x.json](benchmarks-x.json)."
    heading, first, *caveats = render(PAGE, replace(RUN, machine=machine, is_quick=is_quick)).strip().split("\n\n")
    assert (heading, first) == ("# X", written)
    assert len(caveats) == len(texts)
    assert all(text in caveat for text, caveat in zip(texts, caveats, strict=True))


def test_a_machine_is_described_with_the_chosen_packages() -> None:
    assert MACHINE.words() == "P, 2 cores, 8.0 GiB, Linux 6, Python 3.11"
    assert MACHINE.words("moto", "torch") == "P, 2 cores, 8.0 GiB, Linux 6, Python 3.11, moto 5.2.5, torch 2.13.0"
    assert replace(MACHINE, revision="1a2b+").words().endswith("Python 3.11, Everstep at 1a2b+")
    assert MACHINE.load == "0.96, 0.20, 0.34"


# -- tests of tables


def test_a_table_has_the_columns_that_have_entries() -> None:
    plain = Row(what="plain", value=0.25, n=3)
    slow = Row(what="slow | late", value=3.0, unit="ms", low=2.5, high=1234.5, limit=2.0, against="a peer's").judged()
    assert limits([plain]) == "| what | measured | n |\n| --- | --- | --- |\n| plain | **0.25** | 3 |"
    assert str(limits([plain, slow])).splitlines()[0] == "| what | measured | 95 % | n | to reach | verdict |"
    assert str(limits([slow])).splitlines()[2] == (
        "| slow \\| late | **3** ms | 2.5 to 1,234 | 1 | ≤ 2 ms, a peer's | **falls short** |"
    )
    assert limits([]) is None
    assert table(("a",), [("1",)]) == "| a |\n| --- |\n| 1 |"


def test_a_percentage_has_a_sign_and_no_unit() -> None:
    row = Row(what="cost", value=0.0123, unit="%", low=-0.001, high=0.02, limit=0.05).judged()
    assert str(limits([row])).splitlines()[2] == "| cost | **+1.2%** | -0.1% to +2.0% | 1 | ≤ +5.0% | pass |"
    assert line(row).split() == ["pass", "cost", "+1.2%", "(≤", "+5.0%)"]


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (16.66, "16.7"), (0.0134, "0.0134"), (2.0, "2"), (float("inf"), "inf")]
)
def test_a_number_has_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_wrong_bytes_fall_short_on_a_busy_machine_too() -> None:
    wrong = Row(value=1.0, verified=False, verdict=Verdict.SHORT, reason="the bytes differ")
    late = Row(value=2.0, limit=1.0).judged()
    shown = Row(value=3.0)
    found = without_verdicts([wrong, late, shown])
    assert [row.verdict for row in found] == [Verdict.SHORT, Verdict.INCONCLUSIVE, Verdict.NONE]

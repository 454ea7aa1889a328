"""Properties of the post-mortem: its figures add up, and no text of users or ranks changes its structure."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from control_plane.accounts.postmortem import Stack, TimelineEntry, WrittenNote, markdown
from control_plane.core.observed.facts import Recorded
from tests.unit.control_plane.accounts.test_incidents import RECOVERED
from tests.unit.control_plane.accounts.test_postmortem import WHOLE

LENGTHS = st.lists(st.floats(0, 1e5, allow_nan=False), min_size=4, max_size=4)
TOKENS = ("```", "~~~", "# ", "> ", "---", "===", "| a |", "1. ", "1) ", "- ", "*", "<b>", "\x1b[31m", "\n", " ", "a")
HOSTILE = st.lists(st.sampled_from(TOKENS), max_size=12).map("".join)
ROW = re.compile(r"^\| (\S+) \| ([0-9.]+) \|$", re.MULTILINE)


@given(start=st.floats(1e9, 2e9), lengths=LENGTHS)
def test_the_phases_add_up_to_the_interruption(start: float, lengths: list[float]) -> None:
    failed, opened, replaced, restored, closed = accumulate(lengths, initial=start)
    account = replace(
        RECOVERED, failed_at=failed, opened_at=opened, replaced_at=replaced, restored_at=restored, closed_at=closed
    )
    rows = dict(ROW.findall(markdown(replace(WHOLE, account=account, written_at=closed))))
    total = rows.pop("**interruption**")
    assert list(rows) == ["detect", "replace", "restore", "rework"]
    assert sum(round(float(part) * 100) for part in rows.values()) == round(float(total) * 100)
    assert abs(float(total) - (closed - failed)) <= 0.005 + 1e-6


@given(start=st.floats(1e9, 2e9), lengths=LENGTHS, known=st.integers(0, 3))
def test_the_phases_of_an_open_incident_add_up_to_the_time_until_now(
    start: float, lengths: list[float], known: int
) -> None:
    failed, opened, replaced, restored, now = accumulate(lengths, initial=start)
    account = replace(
        RECOVERED,
        failed_at=failed,
        opened_at=opened,
        replaced_at=replaced if known > 1 else None,
        restored_at=restored if known > 2 else None,
        closed_at=None,
    )
    rows = dict(ROW.findall(markdown(replace(WHOLE, account=account, written_at=now))))
    total = rows.pop("**interruption**")
    assert sum(round(float(part) * 100) for part in rows.values()) == round(float(total) * 100)
    assert abs(float(total) - (now - failed)) <= 0.005 + 1e-6


def structure(document: str) -> list[str]:
    """Return the headings and tables of a document as a reader of CommonMark sees them, outside of code blocks."""
    found: list[str] = []
    fence = ""
    for line in document.split("\n"):
        if fence:
            fence = "" if line == fence else fence
            continue
        opening = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if opening:
            fence = opening[1]
            continue
        inner = re.sub(r"^(?:> ?|- |\d+\. )", "", line)
        if re.match(r" {0,3}(#{1,6}(\s|$)|\||=+\s*$|-{2,}\s*$|(\*\s*){3,}$)", inner):
            found.append(line)
    assert not fence, "a code block is open at the end"
    return found


@given(text=HOSTILE, lines=st.lists(HOSTILE, max_size=3))
def test_no_text_adds_a_heading_or_a_table(text: str, lines: list[str]) -> None:
    def written(word: str, block: str, printed: tuple[str, ...]) -> list[str]:
        account = replace(RECOVERED, evidence=(Recorded(text=word),), decision=Recorded(text=word))
        document = replace(
            WHOLE,
            account=account,
            owner=word,
            events=(TimelineEntry(101.0, word),),
            lines=printed,
            stacks=(Stack((0,), block),),
            notes=(WrittenNote(130.0, word, block),),
        )
        return structure(markdown(document))

    printed = tuple(line.replace("\n", " ") for line in lines) or ("x",)
    # An empty decision would omit its section.
    assert written(text if text.strip() else "a", text, printed) == written("a", "a", ("a",))

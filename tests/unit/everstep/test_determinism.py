"""The comparison of a determinism check finds the first difference, and reports no success without evidence."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from everstep.determinism import (
    SHOWN_NAMES,
    START,
    Entry,
    Finding,
    Kind,
    Pattern,
    RankReport,
    Record,
    Source,
    compare,
    conclude,
)

KINDS = [kind for kind in Kind if kind is not Kind.RESTORED]


@st.composite
def records(draw: st.DrawFn) -> Record:
    names = st.sampled_from("abc")
    entries = st.lists(st.builds(Entry, st.sampled_from(KINDS), names, st.sampled_from("01")), min_size=1, max_size=6)
    steps = draw(st.dictionaries(st.integers(2, 5), entries, min_size=1))
    return Record(1, steps)


def copied(record: Record) -> Record:
    return Record(record.kept_step, {step: list(entries) for step, entries in record.steps.items()})


def passes_of(record: Record, step: int, place: int, digests: tuple[str, str, str]) -> list[Record]:
    """Return three copies of a record. The entry at `place` of a step has the first, second or third digest."""
    found = [copied(record) for _ in range(3)]
    for each, digest in zip(found, digests, strict=True):
        entry = each.steps[step][place]
        each.steps[step][place] = Entry(entry.kind, entry.name, digest)
    return found


@given(records())
def test_equal_passes_have_no_difference(record: Record) -> None:
    assert compare(0, [copied(record) for _ in range(3)], varies_hash=True) is None


PATTERNS = {
    ("x", "y", "y"): Pattern.RESTART,
    ("x", "x", "y"): Pattern.HASH,
    ("x", "y", "z"): Pattern.EVERY_RUN,
    ("x", "y", "x"): Pattern.EVERY_RUN,
}


@given(records(), st.data(), st.sampled_from(sorted(PATTERNS)), st.booleans())
def test_the_first_difference_is_found_whatever_follows(
    record: Record, data: st.DataObject, digests: tuple[str, str, str], varies_hash: bool
) -> None:
    step = data.draw(st.sampled_from(sorted(record.steps)))
    place = data.draw(st.integers(0, len(record.steps[step]) - 1))
    passes = passes_of(record, step, place, digests)
    for number, each in enumerate(passes):  # Everything that follows differs between all passes.
        each.steps[step] = [
            entry if at <= place else Entry(entry.kind, entry.name, str(number))
            for at, entry in enumerate(each.steps[step])
        ]
        for later in [later for later in each.steps if later > step]:
            each.steps[later] = [Entry(Kind.STATE, "later", str(number))]
    finding = compare(3, passes, varies_hash=varies_hash)
    assert finding is not None
    changed = record.steps[step][place]
    assert (finding.rank, finding.step, finding.kind, finding.names[0]) == (3, step, changed.kind, changed.name)
    expected = PATTERNS[digests]
    assert finding.pattern is (Pattern.EVERY_RUN if expected is Pattern.HASH and not varies_hash else expected)


@given(records(), st.data(), st.integers(0, 2))
def test_an_entry_that_one_pass_lacks_is_a_difference(record: Record, data: st.DataObject, which: int) -> None:
    passes = [copied(record) for _ in range(3)]
    step = data.draw(st.sampled_from(sorted(record.steps)))
    removed = passes[which].steps[step].pop()
    finding = compare(0, passes, varies_hash=True)
    assert finding is not None
    assert (finding.step, finding.kind, finding.names) == (step, removed.kind, (removed.name,))


@given(records(), st.data(), st.integers(0, 2))
def test_a_step_that_one_pass_lacks_is_a_difference(record: Record, data: st.DataObject, which: int) -> None:
    passes = [copied(record) for _ in range(3)]
    step = data.draw(st.sampled_from(sorted(record.steps)))
    del passes[which].steps[step]
    finding = compare(0, passes, varies_hash=True)
    assert finding is not None
    assert finding.step == step


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_another_number_of_passes_is_an_error(count: int) -> None:
    with pytest.raises(ValueError, match="values to unpack"):
        compare(0, [Record(1)] * count, varies_hash=True)


def found(kind: Kind, digests: str, *, repeats: bool = True, **others: Any) -> Finding:
    """Return the finding for one entry with the given digests, one character per pass (run of the same steps)."""
    passes = [Record(1, {2: [Entry(kind, "it", digest, repeats)]}, **others) for digest in digests]
    finding = compare(0, passes, varies_hash=True)
    assert finding is not None
    return finding


@pytest.mark.parametrize(
    ("kind", "digests", "repeats", "calls", "source"),
    [
        (Kind.RESTORED, "xyy", True, [], Source.RESTORE),
        (Kind.ORDER, "xyz", True, [], Source.DATA_ORDER),
        (Kind.SAMPLE, "xyz", True, [], Source.DATASET),
        (Kind.SAMPLE, "xyz", False, [], Source.AUGMENTATION),
        (Kind.BATCH, "xyz", True, [], Source.COLLATOR),
        (Kind.LOADED, "xyz", True, [], Source.LOADER),
        (Kind.GENERATOR, "xyz", True, [], Source.GENERATOR),
        (Kind.SETTING, "xyz", True, [], Source.OPTIMIZER_SETTING),
        (Kind.GRADIENT, "xyz", True, [], Source.KERNEL),
        (Kind.GRADIENT, "xyz", True, ["time.time at a.py:1"], Source.KERNEL),
        (Kind.GRADIENT, "xyz", True, ["os.urandom at a.py:1"], Source.ENTROPY),
        (Kind.GRADIENT, "xyy", True, ["os.urandom at a.py:1"], Source.UNKEPT_STATE),
        (Kind.STATE, "xyy", True, [], Source.UNKEPT_STATE),
        (Kind.STATE, "xyz", True, [], Source.KERNEL),
        (Kind.OBJECT, "xyz", True, [], Source.REGISTERED_OBJECT),
        (Kind.VALUE, "xyz", True, [], Source.LOGGED_VALUE),
        (Kind.VALUE, "xyy", True, [], Source.UNKEPT_STATE),
        *((kind, "xxz", True, [], Source.HASH_ORDER) for kind in Kind),
    ],
)
def test_the_source_follows_from_kind_pattern_and_evidence(
    kind: Kind, digests: str, repeats: bool, calls: list[str], source: Source
) -> None:
    finding = found(kind, digests, repeats=repeats, calls={2: calls})
    assert finding.source is source
    assert finding.calls == tuple(calls)
    report = RankReport(0, 1, 1, 4, finding)
    verdict = conclude([report])
    assert (verdict.is_deterministic, verdict.source) == (False, source)
    assert "Step 2, rank 0: " in verdict.sentence
    assert "(it)" in verdict.sentence
    assert verdict.advice.endswith(f"See docs/resume.md#{source}.")


def test_calls_before_the_first_step_are_evidence_about_the_data_only() -> None:
    calls = {START: ["os.listdir at a.py:1"]}
    assert found(Kind.SAMPLE, "xyz", calls=calls).calls == ("os.listdir at a.py:1",)
    assert found(Kind.GRADIENT, "xyz", calls=calls).calls == ()


def test_private_generators_are_evidence_only_if_the_restarts_agree() -> None:
    assert found(Kind.GRADIENT, "xyy", generators=["train.noise"]).generators == ("train.noise",)
    assert found(Kind.GRADIENT, "xyz", generators=["train.noise"]).generators == ()


def test_a_finding_names_all_entries_of_its_kind_that_differ_and_a_sentence_a_few() -> None:
    count = SHOWN_NAMES + 2
    passes = [
        Record(1, {2: [Entry(Kind.GRADIENT, f"w{at}", f"{number if at else 0}") for at in range(count + 1)]})
        for number in range(3)
    ]
    finding = compare(0, passes, varies_hash=True)
    assert finding is not None
    assert finding.names == tuple(f"w{at}" for at in range(1, count + 1))
    assert "(w1, w2, w3 and 2 more)" in conclude([RankReport(0, 1, 1, 4, finding)]).sentence


def test_the_verdict_is_about_the_earliest_difference_of_all_ranks() -> None:
    def report(rank: int, step: int, kind: Kind) -> RankReport:
        finding = Finding(rank, step, kind, Pattern.EVERY_RUN, Source.KERNEL, ("it",))
        return RankReport(rank, 4, 1, 9, finding)

    reports = [
        report(0, 3, Kind.GRADIENT),
        report(1, 3, Kind.BATCH),
        report(2, 4, Kind.ORDER),
        RankReport(3, 4, 1, 9),
    ]
    for order in (reports, reports[::-1]):
        assert "Step 3, rank 1: " in conclude(order).sentence


def test_a_check_without_evidence_is_no_success() -> None:
    whole = [RankReport(rank, 2, 2, 8) for rank in range(2)]
    assert conclude(whole).is_deterministic
    assert conclude(whole).sentence == "Steps 3 to 8 are bit-identical after two restarts, on 2 ranks."
    for missing in ([], whole[:1], whole[1:]):
        verdict = conclude(missing)
        assert not verdict.is_deterministic
        assert "Ranks without a report" in verdict.sentence
    problem = conclude([whole[0], RankReport(1, 2, 2, 8, problem="the script ended")])
    assert (problem.is_deterministic, problem.sentence) == (False, "Rank 1: the script ended")

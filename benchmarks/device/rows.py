"""Converts the measurements of each part of the GPU benchmark to table rows with verdicts. Pure.

A row is inconclusive if its floor, the rate of plain pinned copies, changed. It misses its limit if a compared snapshot
has wrong bytes, or if its part failed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.device.parts import CAPTURE, GIB, GPT, GRAPH, RESTORE
from benchmarks.measures import (
    FLOOR_TOLERANCE_RATIO,
    LEAST_COMMITS_RATIO,
    Floor,
    Summary,
    Verdict,
    bootstrap_interval,
    moved_ratio,
    paired_ratios,
    percentile,
)
from benchmarks.rows import Row

LEAST_STATE_BYTES = 8 * GIB
"""The capture rate of a smaller state is inconclusive."""
LEAST_RATE_RATIO = 0.9
"""Captures into registered slots ÷ plain copies of pinned memory."""
MOST_SLOWDOWN_RATIO = 0.01
LEAST_PAIRS = 4
"""Pairs of blocks below which a slowdown is inconclusive."""


def of_part(part: str, found: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a part. A missing value becomes a row that misses its limit."""
    makers: Mapping[str, Callable[[Mapping[str, Any]], list[Row]]] = {
        CAPTURE: of_capture,
        RESTORE: of_restore,
        GPT: of_gpt,
        GRAPH: of_graph,
    }
    rows = makers[part](found)
    return [*rows, broken(part, str(found["failure"]))] if found.get("failure") else rows


def broken(part: str, reason: str) -> Row:
    """Return the row of a failed or stopped part."""
    return Row(what=f"the part {part} ran to its end", value=0.0, unit="", n=0, verdict=Verdict.SHORT, reason=reason)


def floor_of(found: Mapping[str, Any]) -> Floor:
    """Return the rates of plain copies in GiB/s, for each half of the run."""
    rates = [rate(found["bytes"], seconds) for seconds in found["seconds"]]
    half = max(1, len(rates) // 2)
    return Floor(Summary.of(rates[:half]), Summary.of(rates[half:] or rates[:half]))


def rate(size: int, seconds: float) -> float:
    """Return GiB/s."""
    return size / GIB / seconds


def of_capture(found: Mapping[str, Any]) -> list[Row]:
    """Return the rows of `copying.capture`, as far as measured."""
    size, rows = found["payload_bytes"], []
    if "registered" in found:
        rows += _registered(found["registered"], size, floor_of(found["floor"]))
    if "bounce" in found:
        rows.append(_rates("capture through the bounce ring, nothing registered", found["bounce"], size, skip=1))
        rows.append(_allocations("bounce ring", found["bounce"]))
    if "fresh" in found:
        rows.append(_rates("capture into a slot registered before its first use", found["fresh"], size))
    for name, title in (
        ("registration", "registration of allocated pages"),
        ("cold_registration", "allocation and registration of new pages"),
    ):
        if name in found:
            each = found[name]
            rows.append(Row(what=title, value=each["seconds"] * GIB / each["bytes"], unit="s/GiB"))
            driver = each["driver_seconds"] * GIB / each["bytes"]
            rows.append(Row(what="of that, time in the driver", value=driver, unit="s/GiB"))
    if "floor" in found:
        rows.append(_pinned("pinned memory, device to host", floor_of(found["floor"]), len(found["floor"]["seconds"])))
    return rows


def _registered(captures: Mapping[str, Any], size: int, floor: Floor) -> list[Row]:
    figure = _rates("capture into a registered slot", captures, size)
    judged = against_floor(replace(figure, limit=LEAST_RATE_RATIO * floor.median, is_least=True), floor, size)
    gib = size / GIB
    held = [1000 * seconds for seconds in captures["begin_seconds"]]
    waited = [1000 * seconds for seconds in captures["wait_seconds"]]
    cpu = [seconds / gib for seconds in captures["cpu_seconds"]]
    return [
        judged,
        _allocations("registered", captures),
        _shown("time the training thread is blocked at the start of a capture", held, "ms"),
        _shown("further wait of the training thread, if it changes the state at once", waited, "ms"),
        _shown("processor time of a capture", cpu, "s/GiB"),
    ]


def against_floor(row: Row, floor: Floor, size: int) -> Row:
    """Return a row of a copy rate with its verdict, relative to plain copies. `size` is bytes per measurement."""
    moved = floor.moved_ratio
    told = replace(row, floor_moved_ratio=moved, against=f"{LEAST_RATE_RATIO:g} × pinned memory's {floor.median:.1f}")
    assert row.limit is not None
    if row.verified is False:
        return replace(told, verdict=Verdict.SHORT, reason="the bytes in the slot are not the device's")
    if moved > FLOOR_TOLERANCE_RATIO:
        return replace(told, verdict=Verdict.INCONCLUSIVE, reason=f"its floor moved by {moved:.0%} in the run")
    if size < LEAST_STATE_BYTES:
        return replace(
            told,
            verdict=Verdict.INCONCLUSIVE,
            reason=f"{size / GIB:.2f} GiB, at least {LEAST_STATE_BYTES / GIB:.0f} are wanted",
        )
    if row.low is not None and row.high is not None and row.low < row.limit <= row.high:
        return replace(told, verdict=Verdict.INCONCLUSIVE, reason="the interval has the limit in it")
    return replace(told, verdict=Verdict.PASS if row.value >= row.limit else Verdict.SHORT)


def of_restore(found: Mapping[str, Any]) -> list[Row]:
    """Return the rows of `copying.restore`."""
    floor, size = floor_of(found["floor"]), found["payload_bytes"]
    figure = _rates("restore into the device, from a slot that is not registered", found, size)
    share = f"{figure.value / floor.median:.2f} of pinned memory's {floor.median:.1f}"
    mapped = [1000 * seconds for seconds in found["mapping_seconds"]]
    return [
        replace(figure, against=share, floor_moved_ratio=floor.moved_ratio),
        _shown("of that, until the slot was mapped", mapped, "ms"),
        _pinned("pinned memory, host to device", floor, len(found["floor"]["seconds"])),
    ]


def of_gpt(found: Mapping[str, Any]) -> list[Row]:
    """Return the rows of `rank/train.py`."""
    commits = found["commits"] / max(1, found["kept_steps"])
    blocked = [1000 * seconds for seconds in found["blocked_seconds"]]
    rows = [
        slowdown(found["order"], found["step_seconds"], commits),
        Row(
            what="commits ÷ steps, a snapshot at every step",
            value=commits,
            unit="ratio",
            n=found["kept_steps"],
            limit=LEAST_COMMITS_RATIO,
            is_least=True,
            verdict=Verdict.PASS if commits >= LEAST_COMMITS_RATIO else Verdict.SHORT,
        ),
        _zero(
            "calls in the loop that waited for the device",
            len(found["synchronizations"]),
            ", ".join(sorted(set(found["synchronizations"]))[:3]),
        ),
    ]
    if "verified" in found:
        rows.append(whole(found["verified"]))
    if blocked:
        rows.append(_shown("the training thread held by a snapshot, p50", blocked, "ms"))
        rows.append(
            Row(
                what="the training thread held by a snapshot, p99",
                value=percentile(blocked, 0.99),
                unit="ms",
                n=len(blocked),
            )
        )
    return rows


def slowdown(order: str, blocks: Sequence[Sequence[float]], commits: float) -> Row:
    """Return the row with the slowdown.

    `order` has A (with snapshots) or B per block, `blocks` the seconds of steps.
    """
    means = [statistics.fmean(block) for block in blocks]
    ratios = paired_ratios(order, means)
    low, high = bootstrap_interval(lambda samples: statistics.fmean(samples[0]), ratios)
    plain = [mean for letter, mean in zip(order, means, strict=True) if letter == "B"]
    moved = moved_ratio(min(plain), max(plain))
    row = Row(
        what="a step's mean time, every step kept, beyond one of which nothing is",
        value=statistics.fmean(ratios),
        unit="ratio",
        low=low,
        high=high,
        n=len(ratios),
        limit=MOST_SLOWDOWN_RATIO,
        against=f"steps of {1000 * statistics.fmean(plain):.0f} ms, pairs of blocks",
        floor_moved_ratio=moved,
    )
    told = f"commits ÷ steps {commits:.2f}"
    if moved > FLOOR_TOLERANCE_RATIO:
        return replace(
            row, verdict=Verdict.INCONCLUSIVE, reason=f"{told}; steps without snapshots moved by {moved:.0%} in the run"
        )
    if low > MOST_SLOWDOWN_RATIO:
        return replace(row, verdict=Verdict.SHORT, reason=told)
    if commits < LEAST_COMMITS_RATIO:
        return replace(
            row, verdict=Verdict.SHORT, reason=f"{told}, {LEAST_COMMITS_RATIO} to reach: fewer snapshots cost less"
        )
    if len(ratios) < LEAST_PAIRS:
        return replace(
            row, verdict=Verdict.INCONCLUSIVE, reason=f"{told}; {len(ratios)} pairs, at least {LEAST_PAIRS} are wanted"
        )
    if high > MOST_SLOWDOWN_RATIO:
        return replace(row, verdict=Verdict.INCONCLUSIVE, reason=f"{told}; the interval has the limit in it")
    return replace(row, verdict=Verdict.PASS, reason=told)


def whole(found: Mapping[str, Any]) -> Row:
    """Return the row of committed steps with wrong bytes on the holder, from `Verified` as a mapping."""
    committed, torn, unseen = (len(found[name]) for name in ("committed", "torn", "unseen"))
    row = replace(
        _zero("kept steps whose bytes on the holder were not those of their boundary", torn, ""),
        n=committed - unseen,
        verified=not torn,
    )
    told = f"{len(found['equal'])} of {len(found['steps'])} steps compared whole on the holder and equal"
    if torn:
        return replace(row, reason=f"torn: steps {', '.join(str(step) for step in found['torn'])}; {told}")
    if unseen or not committed:
        return replace(
            row,
            verdict=Verdict.INCONCLUSIVE,
            verified=None,
            reason=f"{unseen} were written over before they were read; {told}",
        )
    return replace(row, reason=told)


def of_graph(found: Mapping[str, Any]) -> list[Row]:
    """Return the rows of `graph.survives`."""
    title = "a graph captured while a copy was under way, and what it computes"
    faults = []
    if found["copy_error"]:
        faults.append(f"the copy failed: {found['copy_error']}")
    if not found["slot_equal"]:
        faults.append("the bytes in the slot are not the device's")
    if found["weights_differ"] > found["tolerance"]:
        faults.append(f"its weights differ from those without a graph by {found['weights_differ']:.1e}")
    survived = Row(
        what=title,
        value=found["weights_differ"],
        unit="relative difference",
        limit=found["tolerance"],
        n=found["replays"],
    )
    if faults:
        survived = replace(survived, verdict=Verdict.SHORT, reason="; ".join(faults))
    elif not found["was_in_flight"]:
        survived = replace(survived, verdict=Verdict.INCONCLUSIVE, reason="the copy had ended before the capture began")
    else:
        survived = replace(survived, verdict=Verdict.PASS)
    torn = _zero("snapshots between replays that were torn", found["torn"], "")
    return [replace(survived, verified=found["slot_equal"]), replace(torn, n=found["kept"], verified=not found["torn"])]


def _rates(title: str, found: Mapping[str, Any], size: int, *, skip: int = 0) -> Row:
    rates = [rate(size, seconds) for seconds in found["seconds"][skip:]]
    low, high = bootstrap_interval(lambda samples: statistics.median(samples[0]), rates)
    is_equal = all(found["equal"]) and bool(found["equal"])
    verdict = Verdict.NONE if is_equal else Verdict.SHORT
    reason = "" if is_equal else "the bytes differ"
    return Row(
        what=title,
        value=statistics.median(rates),
        unit="GiB/s",
        low=low,
        high=high,
        n=len(rates),
        verified=is_equal,
        verdict=verdict,
        reason=reason,
    )


def _pinned(title: str, floor: Floor, count: int) -> Row:
    return Row(what=title, value=floor.median, unit="GiB/s", n=count, floor_moved_ratio=floor.moved_ratio)


def _allocations(kind: str, captures: Mapping[str, Any]) -> Row:
    title = f"requests for device or pinned memory while a snapshot is taken, {kind}"
    return replace(_zero(title, captures["allocation_count"], ""), n=len(captures["seconds"]))


def _zero(title: str, count: int, reason: str) -> Row:
    return Row(
        what=title,
        value=count,
        unit="count",
        limit=0.0,
        verdict=Verdict.SHORT if count else Verdict.PASS,
        reason=reason if count else "",
    )


def _shown(title: str, values: Sequence[float], unit: str) -> Row:
    low, high = bootstrap_interval(lambda samples: statistics.median(samples[0]), values)
    return Row(what=title, value=statistics.median(values), unit=unit, low=low, high=high, n=len(values))

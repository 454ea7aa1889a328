"""Computes the table rows, the page and the picture of the data plane benchmark. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.data_plane import encryption
from benchmarks.data_plane.char_gpt import COUNTED_STEPS, CYCLES, KINDS, LAUNCHES, SKIPPED_STEPS, WARM_UP_STEPS
from benchmarks.data_plane.encryption import Transfer
from benchmarks.data_plane.rows import EVERSTEP, GOALS, PEER_TOLERANCE_RATIO, Figure, LaunchFloor, moved_together
from benchmarks.measures import Verdict
from benchmarks.page import BenchmarkRun, Page
from benchmarks.picture import OWN_COLOUR, PEER_COLOUR, Bar, Panel, panels
from benchmarks.rows import limits, number, table, without_verdicts

Seconds = Mapping[str, Sequence[float]]
"""Seconds of each of the two processes, by operation."""
Floors = dict[int, dict[str, LaunchFloor]]
"""Floors by state size in MiB, of Everstep's launches."""
PICTURE = "Milliseconds per GiB by system, with floors"
PANELS = (
    ("training blocked per snapshot", "blocked", ("memcpy",)),
    ("on both nodes, both directions at once", "commit", ("both_ways", "digest")),
    ("restore into the model, own node", "restore_local", ("memcpy",)),
    ("restore into the model, from the peer", "restore_peer", ("one_way", "digest")),
)
OWN_METRIC = {"blocked": "blocked_p50"}
TITLES = {goal.metric + goal.suffix: goal.title for goal in GOALS} | {
    "launches": "all launches",
    "blocked_audited": "the first three snapshots of a launch, audited: copied whole at the boundary and compared",
    "blocked_tight": "training blocked per snapshot, spans of twice the copy",
    "restore_peer_fetch": "of a rank that waits: until all was verified on its own node",
    "restore_added": "fetch from the peer, and restore of a rank that comes when it is over",
    "first_commit": "first snapshot (audited, so compared when the next change is due) ÷ later ones (not audited), to "
    "the commit",
    "first_raw": "first snapshot (audited) ÷ later ones (not audited), blocked",
    "tight_commits": "commits ÷ steps, spans of twice the copy",
    "agent": "private memory of an agent while nothing runs: a baseline, not counted above",
    **{f"char_gpt_{kind}_step": f"char-GPT, {name}: a step that nobody keeps" for kind, name in KINDS.items()},
    **{f"char_gpt_{kind}_slowdown": f"char-GPT, {name}: slowdown of a step" for kind, name in KINDS.items()},
    **{f"char_gpt_{kind}_cpu": f"char-GPT, {name}: processor seconds per GiB kept" for kind, name in KINDS.items()},
}
PEER_TITLES = {
    "blocked": "blocked per snapshot",
    "blocked_tight": "the same, short spans",
    "commit": "on the peer",
    "restore_local": "restore, own node",
    "restore_peer": "restore, peer",
    "memory": "memory, bytes/byte",
    "first_raw": "first ÷ later",
}
FLOOR_TITLES = {
    "memcpy": "memcpy into warm shared memory",
    "digest": "xxh3-128",
    "one_way": "socket, one way",
    "both_ways": "sockets, both ways at once",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run."""

    figures: Sequence[Figure]
    floors: Floors
    encryption: Sequence[Transfer] = ()
    """Empty if this part was not measured."""


def rows(run: Run) -> list[Figure]:
    """Return one table row per measured value. On a busy machine, all verdicts are inconclusive."""
    return without_verdicts(run.figures) if run.is_busy else list(run.figures)


def values(run: Run) -> dict[str, str | None]:
    """Return the text per placeholder of the page's template.

    None omits its paragraph, item or section (`benchmarks.page`).
    """
    plain = [figure for figure in rows(run) if not figure.metric.startswith("char_gpt")]
    model = [figure for figure in rows(run) if figure.metric.startswith("char_gpt")]
    peers, notes = _peers(plain) if any(figure.system != EVERSTEP for figure in plain) else (None, None)
    return {
        "machine": run.machine.words(*run.machine.versions),
        "encryption": encryption.words(run.encryption) if run.encryption else None,
        "peer_tolerance": f"{PEER_TOLERANCE_RATIO:.0%}",
        "floors": _floors(run.floors),
        "limits": limits(
            [figure for figure in plain if figure.system == EVERSTEP],
            ("state", "Everstep"),
            lambda figure: (f"{figure.state_mib} MiB", title(figure)),
        ),
        "peers": peers,
        "peer_notes": notes or None,
        "launches": str(LAUNCHES),
        "block_steps": str(SKIPPED_STEPS + COUNTED_STEPS),
        "cycles": str(CYCLES),
        "warm_up": str(WARM_UP_STEPS),
        "counted": str(COUNTED_STEPS),
        "model": limits(
            model, ("", "system"), lambda figure: (title(figure), f"{figure.system} {figure.version}".strip())
        ),
    }


def title(figure: Figure) -> str:
    """Return the first column of a row."""
    return TITLES.get(figure.metric, figure.metric)


def _floors(floors: Floors) -> str:
    rows = [
        [
            f"{size} MiB",
            title,
            ", ".join(number(launch.median) for launch in floor.launches),
            f"{moved_together([floor]):.0%}",
            ", ".join(str(launch.count) for launch in floor.launches),
        ]
        for size, found in floors.items()
        for name, title in FLOOR_TITLES.items()
        if (floor := found.get(name)) is not None
    ]
    return table(("state", "floor, ms/GiB", "launch by launch", "moved", "n"), rows)


def _peers(figures: Sequence[Figure]) -> tuple[str, str]:
    """Return a table of all systems and a list of failures and inconclusive values with reasons, in Markdown."""
    notes = [
        f"- {each.system}, {each.state_mib} MiB, a launch failed: {each.reason}"
        for each in figures
        if each.metric == "launches"
    ]
    rows = []
    for size in sorted({figure.state_mib for figure in figures if figure.metric == "memory"}):
        at_size = [figure for figure in figures if figure.state_mib == size]
        for system in dict.fromkeys(figure.system for figure in at_size):
            found = {figure.metric: figure for figure in at_size if figure.system == system}
            version = next(iter(found.values())).version
            cells = [
                found.get(OWN_METRIC.get(metric, metric) if system == EVERSTEP else metric) for metric in PEER_TITLES
            ]
            rows.append([f"{size} MiB", f"{system} {version}", *(_cell(figure) for figure in cells)])
            unsure = [
                each
                for each in cells
                if each is not None and each.verdict is Verdict.INCONCLUSIVE and system != EVERSTEP
            ]
            notes += [f"- {system}, {PEER_TITLES[each.metric]}, {size} MiB: {each.reason}" for each in unsure]
    return table(("state", "system", *PEER_TITLES.values()), rows), "\n".join(notes)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "–"
    mark = " ⚠" if figure.verdict is Verdict.INCONCLUSIVE and figure.system != EVERSTEP else ""
    return f"{number(figure.value)}{'' if figure.verified is None or figure.verified else ' **wrong bytes**'}{mark}"


def draw(run: Run) -> str:
    """Return the SVG document: a panel per state size and metric, with a bar per system and a line for the floor."""
    drawn = []
    for size, floors in sorted(run.floors.items()):
        for name, metric, parts in PANELS:
            bars = [
                Bar(
                    label=each.system,
                    parts=[(each.value, OWN_COLOUR if each.system == EVERSTEP else PEER_COLOUR)],
                    text=f"{each.value:.1f}",
                )
                for each in run.figures
                if each.state_mib == size
                and each.metric == (OWN_METRIC if each.system == EVERSTEP else {}).get(metric, metric)
                and each.n
            ]
            if bars:
                floor = sum(floors[part].median for part in parts)
                label = f"floor: {' + '.join(parts)} {floor:.0f}"
                drawn.append(Panel(title=f"{name}, {size} MiB, ms/GiB", bars=bars, floor=floor, floor_label=label))
    return panels(PICTURE, drawn)


PAGE = Page(
    name="data-plane",
    command="make bench-data-plane",
    run=Run,
    values=values,
    rows=lambda run: [figure for figure in rows(run) if figure.verdict is not Verdict.NONE],
    draw=draw,
    picture=PICTURE,
    is_section=True,
)

"""Compares the training of a rank with its replays, and names what a restart would lose.

Invariant: it reads records (`everstep.training.recorder`) and source files, and no live object of the script.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from everstep.determinism import Entry, Finding, Kind, Pattern, Record, Source, advice_of, compare, sentence_of
from everstep.protocol.ids import Step
from everstep.protocol.limits import cut
from everstep.protocol.rehearsals import (
    MAX_REHEARSED_CHARACTERS,
    MAX_REHEARSED_NAMES,
    RehearsalVerdict,
    Rehearsed,
    ReplayDifference,
    ScriptLine,
)
from everstep.training import rng
from everstep.training.determinism.script_lines import line_of, lines_of_variables
from everstep.training.determinism.script_values import OF_LIBRARY

_GENERATORS = tuple(kind.__name__ for kind in rng.GENERATORS)
_STATES = ("Tensor", "Parameter", "ndarray", *_GENERATORS)
"""Values that are state even if no repeated step uses them."""


def compare_replays(rank: int, records: Sequence[Record]) -> Finding | None:
    """Return the first difference between the training and its one or two replays, or None."""
    if len(records) == 2:
        return _of_steps(rank, [*records, records[1]]) or _of_variables(rank, [*records, records[1]])
    _, once, again = ({step: _logged(entries) for step, entries in each.steps.items()} for each in records)
    unstable = {
        (step, name)
        for step in once.keys() | again.keys()
        for name, _ in set(once.get(step, ())) ^ set(again.get(step, ()))
    }
    stable = [
        msgspec.structs.replace(
            record,
            steps={
                step: [each for each in entries if each.kind is not Kind.VALUE or (step, each.name) not in unstable]
                for step, entries in record.steps.items()
            },
        )
        for record in records
    ]
    return _of_steps(rank, stable) or _of_variables(rank, records)


def differing(report: Rehearsed, finding: Finding, records: Sequence[Record]) -> Rehearsed:
    """Return the report with the finding. `records` are those of the training and its two replays."""
    is_stable, is_plain = finding.pattern is Pattern.RESTART, finding.kind is Kind.PLAIN
    if is_stable and finding.source is Source.PREFETCH and _is_generator_lost(records):
        # The script's own generator, such as that of a simulator, decides how often the script draws from others.
        finding = msgspec.structs.replace(finding, source=Source.UNKEPT_STATE)
    unkept = _cut(finding.names) if is_plain else unkept_variables(records, finding.step) if is_stable else ()
    if not is_stable and finding.source in (Source.KERNEL, Source.LOADER):
        unkept = _cut(_built_anew(records))
        if unkept or finding.source is Source.LOADER:
            finding = msgspec.structs.replace(finding, source=Source.UNSEEDED)
    sentence = "The repeated steps are equal." if is_plain else sentence_of(finding)
    lines = _lines(finding, unkept, records)
    message = f"{sentence} {_started_anew(unkept, lines)}".rstrip()
    verdict = RehearsalVerdict.DIFFERS if is_stable else RehearsalVerdict.UNSTABLE
    return msgspec.structs.replace(
        report,
        verdict=RehearsalVerdict.UNPROVEN if is_plain else verdict,
        difference=ReplayDifference(
            step=Step(finding.step),
            kind=finding.kind.value,
            source=finding.source.value,
            names=_cut(finding.names),
            unkept=unkept,
            lines=lines,
        ),
        message=cut(message, MAX_REHEARSED_CHARACTERS),
        advice=cut(advice_of(finding), MAX_REHEARSED_CHARACTERS),
    )


def _lines(finding: Finding, unkept: Sequence[str], records: Sequence[Record]) -> tuple[ScriptLine, ...]:
    used = finding.names
    if finding.source is Source.PREFETCH:
        loaded = records[0].steps.get(finding.step, [])
        used = tuple(each.name for each in loaded if each.kind is Kind.LOADED)
    found = [line_of(name, records[0].places[name]) for name in dict.fromkeys(used) if name in records[0].places]
    if finding.kind is Kind.SETTING:
        # The setting has a name such as `lr of group 0`.
        settings = {f"script.{name.partition(' ')[0]}": name for name in finding.names}
        of_settings = lines_of_variables(list(settings))
        found += [msgspec.structs.replace(each, name=settings[each.name]) for each in of_settings]
    return tuple([*found, *lines_of_variables(unkept)][:MAX_REHEARSED_NAMES])


def _of_steps(rank: int, records: Sequence[Record]) -> Finding | None:
    """Return the first difference between the steps, or None. A generator counts before a logged value of its step."""
    found = compare(rank, records, varies_hash=False)
    if found is None or found.kind is not Kind.VALUE:
        return found
    silent = [
        msgspec.structs.replace(
            record,
            steps={
                step: [each for each in entries if each.kind is not Kind.VALUE]
                for step, entries in record.steps.items()
            },
        )
        for record in records
    ]
    cause = compare(rank, silent, varies_hash=False)
    return cause if cause is not None and (cause.step, cause.kind) == (found.step, Kind.GENERATOR) else found


def _of_variables(rank: int, records: Sequence[Record]) -> Finding | None:
    """Return what a restart would lose although no step uses it, such as averaged weights, or changed plain values."""
    moment = max(records[0].variables, default=0)
    unkept = _unkept(records, moment)
    if names := tuple(name for name, kind in unkept if kind in _STATES):
        return Finding(rank, moment // 2, Kind.VARIABLE, Pattern.RESTART, Source.UNKEPT_STATE, names)
    values, early = records[0].variables.get(moment, {}), records[0].early
    # Packages count and time their own work, as engines do. What they need for training is registered.
    found = {name for name, kind in unkept if kind != OF_LIBRARY and early.get(name) != values[name]}
    # A container stands for its elements.
    if names := tuple(name for name in values if name in found and name.rpartition(".")[0] not in found):
        return Finding(rank, moment // 2, Kind.PLAIN, Pattern.RESTART, Source.UNKEPT_VALUE, names)
    return None


def _is_generator_lost(records: Sequence[Record]) -> bool:
    """Return whether the script keeps a random generator that starts anew after a restart."""
    return any(kind in _GENERATORS for moment in records[0].variables for _, kind in _unkept(records, moment))


def _built_anew(records: Sequence[Record]) -> list[str]:
    """Return the tensors and arrays that each process drew anew: constant within a process, different in each."""
    constant = [
        {
            name: value
            for moment in record.variables.values()
            for name, value in moment.items()
            if all(value == other.get(name, value) for other in record.variables.values())
        }
        for record in records
    ]
    return [
        name
        for name, value in constant[0].items()
        if value.partition(" ")[0] in _STATES and len({each.get(name) for each in constant} - {None}) == len(records)
    ]


def _unkept(records: Sequence[Record], moment: int) -> list[tuple[str, str]]:
    """Return names and classes of the variables that differ after a restart, but not between replays."""
    values, once, again = (record.variables.get(moment, {}) for record in records)
    return [
        (name, value.partition(" ")[0])
        for name, value in values.items()
        if name in once and once[name] == again.get(name) != value
    ]


def _logged(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    return [(each.name, each.digest) for each in entries if each.kind is Kind.VALUE]


def unkept_variables(records: Sequence[Record], step: int) -> tuple[str, ...]:
    """Return the first `MAX_REHEARSED_NAMES` variables that differ first after a restart, but not between replays.
    After step 1, only counters are named, because other values may follow from the difference. Random generators come
    first, and the variables of functions that have ended come last.
    """
    moments = records[0].variables
    of_loop = {name.partition(".")[0] for moment in moments if moment % 2 for name in moments[moment]}
    for moment in sorted(moments):
        is_late = moment > 2 * (records[0].kept_step + 1)
        values, early = moments[moment], records[0].early
        # Training has not changed a value that is the same as at its first batch: the value follows from the restart.
        unkept = [each for each in _unkept(records, moment) if early.get(each[0]) != values[each[0]]]
        found = [(name, kind) for name, kind in unkept if kind == "int" or not is_late]
        found.sort(key=lambda each: (each[1] not in _GENERATORS, each[0].partition(".")[0] not in of_loop))
        names = [name for name, _ in found]
        if names or moment > 2 * step:
            return _cut(names)
    return ()


def _cut(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(cut(name, MAX_REHEARSED_CHARACTERS) for name in names[:MAX_REHEARSED_NAMES])


def _started_anew(names: Sequence[str], lines: Sequence[ScriptLine]) -> str:
    places = {each.name: f"{each.file}:{each.line}" for each in lines}
    shown = [f"{name} ({places[name]})" if name in places else name for name in names]
    others = [f"{each.name} at {each.file}:{each.line}" for each in lines if each.name not in names]
    parts = [f"The script uses {', '.join(others)}."] if others else []
    if shown:
        parts.append(f"These variables of the script have other values after a restart: {', '.join(shown)}.")
    return " ".join(parts)

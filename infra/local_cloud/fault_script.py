"""Generates, stores and plays fault scripts: lists of faults and their times, which are stored as JSON.

    [{"at_seconds": 12.5, "fault": "kill-rank", "target": "2"},
     {"at_seconds": 20, "fault": "partition", "target": "job 0 node 1", "within_seconds": 10, "lasts_seconds": 5}, …]

Equal scripts have the same effect on equal clouds. `play` resolves a target when it injects the fault, so a script
works on any cloud.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from infra.local_cloud import fault_kinds, roles
from infra.local_cloud.errors import FaultRefused
from infra.local_cloud.fault_kinds import FAULT, LASTING, WARNINGS, AnyFault, Effect, name_of

FIRST_SECONDS: Final = 5.0
"""Earliest time of a generated fault."""
SECONDS_PER_FAULT: Final = 12.0
"""Average between two generated faults."""
LASTS: Final = (4.0, 20.0)
"""Shortest and longest duration of a generated lasting fault, in seconds."""
NOTICE: Final = (5.0, 30.0)
"""Shortest and longest notice in seconds, shorter than AWS's to fit into short scripts."""


AGAIN_SECONDS: Final = 0.3
"""Pause until the next attempt of a refused fault whose line allows retries."""


_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class _Timing(msgspec.Struct, frozen=True, kw_only=True):
    at_seconds: _Seconds
    """Seconds since the start of the play."""
    within_seconds: _Seconds = 0.0
    """Seconds during which the player retries a refused fault, for example until its target runs."""
    lasts_seconds: _Seconds | None = None
    """Seconds after which the player clears this kind of fault. None: a later line clears it."""


class Moment(_Timing, frozen=True, kw_only=True):
    """One line of a fault script."""

    fault: AnyFault | None = None
    """None if this line clears faults."""
    clears: str = ""
    """Kind to clear. Empty: all lasting faults. Unused if `fault` is set."""


_Maker = Callable[[random.Random, str], AnyFault]
_LOOPBACK: Final[tuple[_Maker, ...]] = (
    lambda _, node: fault_kinds.KillRank(target=node),
    lambda _, node: fault_kinds.KillAgent(target=node),
    lambda _, node: fault_kinds.Terminate(target=node),
    lambda chance, _: fault_kinds.KillControlPlane(down=round(chance.uniform(0, 3), 1)),
    lambda _, node: fault_kinds.Hang(target=node),
    lambda chance, node: fault_kinds.SpotWarning(target=node, after=round(chance.uniform(*NOTICE), 1)),
    lambda _, node: fault_kinds.FailStatus(target=node),
    lambda chance, _: fault_kinds.Throttle(share=round(chance.uniform(0.1, 0.5), 2)),
    lambda chance, _: fault_kinds.BadEvents(delay=round(chance.uniform(0, 5), 1), double=0.3, drop=0.1),
    lambda _, node: fault_kinds.CorruptReplica(target=node),
)
_NAMESPACES: Final[tuple[_Maker, ...]] = (
    lambda _, node: fault_kinds.Partition(target=node),
    lambda chance, node: fault_kinds.SlowNetwork(target=node, megabits=round(chance.uniform(1, 50), 1)),
)


class _Clear(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fault: str
    name: str = ""


_TIMING: Final = msgspec.json.Decoder(_Timing)
_CLEAR: Final = msgspec.json.Decoder(_Clear)


def generate(*, seed: int, minutes: float, nodes: int, has_namespaces: bool) -> list[Moment]:
    """Generate a script, sorted by time. All faults begin within `minutes`. Equal arguments yield equal scripts.

    The last line clears all lasting faults. The numbers of faults of any two kinds differ by one at most.
    `has_namespaces` permits `partition` and `slow-network`.
    """
    chance = random.Random(f"{seed}/{minutes}/{nodes}/{has_namespaces}")
    ends = minutes * 60
    count = max(1, int((ends - FIRST_SECONDS) / SECONDS_PER_FAULT))
    makers = [*_LOOPBACK, *(_NAMESPACES if has_namespaces else ())]
    rounds = [make for _ in range(count // len(makers) + 1) for make in chance.sample(makers, len(makers))]
    moments: list[Moment] = []
    for make in rounds[:count]:
        at = round(chance.uniform(FIRST_SECONDS, ends), 1)
        fault = make(chance, str(chance.randrange(nodes)))
        moments.append(Moment(at_seconds=at, fault=fault))
        # The end of an instance follows its warning, so a script clears no warning.
        if name_of(fault) in LASTING - WARNINGS:
            moments.append(Moment(at_seconds=round(at + chance.uniform(*LASTS), 1), clears=name_of(fault)))
    moments.sort(key=lambda moment: moment.at_seconds)
    return [*moments, Moment(at_seconds=max(ends, moments[-1].at_seconds))]


def encode(moments: Sequence[Moment]) -> bytes:
    """Return a script as JSON, one line of text per line."""
    lines = [msgspec.json.encode(_flat(moment)).decode() for moment in moments]
    return ("[\n" + ",\n".join(lines) + "\n]\n").encode()


def read(path: Path) -> list[Moment]:
    """Read a script, sorted by time, from a JSON file, or a YAML file if `pyyaml` is installed.

    Raises FaultRefused, with the faulty line, if the file is not a fault script.
    """
    try:
        content: Any = _yaml(path) if path.suffix in (".yaml", ".yml") else msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise FaultRefused(f"{path} is no fault script: {error}") from error
    if not isinstance(content, list):
        raise FaultRefused(f"{path} is no fault script: its content is not a list")
    return sorted(
        (_moment(path, number, line) for number, line in enumerate(content, 1)), key=lambda moment: moment.at_seconds
    )


def play(
    moments: Sequence[Moment],
    *,
    aim: Callable[[AnyFault], Sequence[AnyFault]],
    inject: Callable[[AnyFault], Effect],
    clear: Callable[[str], object],
    wait_until: Callable[[float], float],
    report: Callable[[Moment, Effect | FaultRefused | None], None],
) -> None:
    """Play a script: inject each fault at its time. Report and skip refused faults.

    `aim` returns one fault per instance that a target selects. `inject` raises FaultRefused for an impossible fault.
    `clear` gets a kind, or an empty name for all. `wait_until` waits until a time in seconds since the start, and
    returns the current time. `report` receives each line with its outcome, once per selected instance; None for a line
    that clears faults.
    """
    # The counter keeps lines that are due at the same time in the order of the script.
    order = itertools.count()
    due = [(moment.at_seconds, next(order), moment) for moment in moments]
    heapq.heapify(due)
    while due:
        at, _, moment = heapq.heappop(due)
        now = max(at, wait_until(at))
        try:
            outcomes = _struck(moment.fault, aim, inject) if moment.fault else [clear(moment.clears)]
        except FaultRefused as refused:
            if moment.fault and now + AGAIN_SECONDS <= moment.at_seconds + moment.within_seconds:
                heapq.heappush(due, (now + AGAIN_SECONDS, next(order), moment))
            else:
                report(moment, refused)
            continue
        for outcome in outcomes:
            report(moment, outcome if isinstance(outcome, Effect | FaultRefused) else None)
        if moment.fault and moment.lasts_seconds is not None:
            over = Moment(at_seconds=round(now + moment.lasts_seconds, 3), clears=name_of(moment.fault))
            heapq.heappush(due, (over.at_seconds, next(order), over))


def role_of(moment: Moment) -> roles.FaultRole | None:
    """Return the role, such as `job 0 node 2`, in a line's target; None without a role."""
    return roles.parse(getattr(moment.fault, "target", ""))


def _struck(
    fault: AnyFault, aim: Callable[[AnyFault], Sequence[AnyFault]], inject: Callable[[AnyFault], Effect]
) -> Sequence[Effect | FaultRefused]:
    """Inject a fault into each selected instance. Raise the first refusal if all refuse."""
    outcomes: list[Effect | FaultRefused] = []
    for one in aim(fault):
        try:
            outcomes.append(inject(one))
        except FaultRefused as refused:
            outcomes.append(refused)
    for outcome in outcomes:
        if isinstance(outcome, Effect):
            return outcomes
    raise next(outcome for outcome in outcomes if isinstance(outcome, FaultRefused))


def _flat(moment: Moment) -> dict[str, Any]:
    if moment.fault is None:
        return {"at_seconds": moment.at_seconds, "fault": "clear", **({"name": moment.clears} if moment.clears else {})}
    values = {name: value for name, value in msgspec.to_builtins(moment.fault).items() if name != "fault"}
    defaults = msgspec.to_builtins(type(moment.fault)())
    changed = {name: value for name, value in values.items() if value != defaults[name]}
    timing = {"within_seconds": moment.within_seconds or None, "lasts_seconds": moment.lasts_seconds}
    return {
        "at_seconds": moment.at_seconds,
        "fault": name_of(moment.fault),
        **changed,
        **{name: seconds for name, seconds in timing.items() if seconds is not None},
    }


def _moment(path: Path, number: int, line: object) -> Moment:
    if not isinstance(line, dict):
        raise FaultRefused(f"{path}, line {number} of the script: {line!r} is not a JSON object with a fault")
    fields = {str(name): value for name, value in line.items()}
    try:
        is_clear = fields.get("fault") == "clear"
        names = ("at_seconds",) if is_clear else _Timing.__struct_fields__
        timing = _TIMING.decode(msgspec.json.encode({name: fields.pop(name) for name in names if name in fields}))
        content = msgspec.json.encode(fields)
        if is_clear:
            return Moment(at_seconds=timing.at_seconds, clears=_CLEAR.decode(content).name)
        fault = FAULT.decode(content)
        roles.check(fault)
        if timing.lasts_seconds is not None and name_of(fault) not in LASTING:
            raise FaultRefused(f"{name_of(fault)} is not a lasting fault: remove `lasts_seconds`")
        return Moment(fault=fault, **msgspec.structs.asdict(timing))
    except (msgspec.ValidationError, TypeError, FaultRefused) as error:
        raise FaultRefused(f"{path}, line {number} of the script: {error}") from error


def _yaml(path: Path) -> object:
    try:
        return msgspec.yaml.decode(path.read_bytes())
    except ImportError as error:
        raise FaultRefused("a script in YAML needs pyyaml: pip install pyyaml, or write JSON") from error

"""Fault scripts: which fault happens when. Made from a seed, written down as JSON, played against a local cloud.

    [{"at_seconds": 12.5, "fault": "kill-rank", "target": "2"},
     {"at_seconds": 20, "fault": "partition", "target": "job 0 node 1", "within_seconds": 10, "lasts_seconds": 5}, …]

Invariant: a script is everything: equal scripts do the same to equal clouds, whoever made them. Targets are numbers, or
roles that are settled when they are struck (`roles`), so that a script fits a cloud whose instances it has never heard
of.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from infra.local_cloud import roles
from infra.local_cloud.errors import FaultRefused
from infra.local_cloud.fault_kinds import (
    FAULT,
    LASTING,
    AnyFault,
    BadEvents,
    CorruptReplica,
    Effect,
    FailStatus,
    Hang,
    KillAgent,
    KillControlPlane,
    KillRank,
    Partition,
    SlowNetwork,
    SpotWarning,
    Terminate,
    Throttle,
    name_of,
)

FIRST_SECONDS: Final = 5.0
"""Nothing happens before."""
SECONDS_PER_FAULT: Final = 12.0
"""On the average: some five in a minute, fifty in ten."""
LASTS: Final = (4.0, 20.0)
"""How long what lasts goes on until it is cleared, seconds."""
NOTICE: Final = (5.0, 30.0)
"""From a warning to the end, seconds: less than AWS gives, as a script is short."""


AGAIN_SECONDS: Final = 0.3
"""From a try that was refused to the next, where a line allows another."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a script."""

    at_seconds: float
    """After the start of the play."""
    fault: AnyFault | None = None
    """None: something is cleared."""
    clears: str = ""
    """Which kind of fault; empty for all that last."""
    within_seconds: float = 0.0
    """How long a fault that is refused is tried again: whoever is meant may not be there yet."""
    lasts_seconds: float | None = None
    """Its kind is cleared so long after it struck; None: a later line does that."""


_Made = tuple[AnyFault, bool]
"""A fault, and whether it lasts until it is cleared."""
_Maker = Callable[[random.Random, str], _Made]
_LOOPBACK: Final[tuple[_Maker, ...]] = (
    lambda _, node: (KillRank(target=node), False),
    lambda _, node: (KillAgent(target=node), False),
    lambda _, node: (Terminate(target=node), False),
    lambda chance, _: (KillControlPlane(down=round(chance.uniform(0, 3), 1)), False),
    lambda _, node: (Hang(target=node), True),
    lambda chance, node: (SpotWarning(target=node, after=round(chance.uniform(*NOTICE), 1)), False),
    lambda _, node: (FailStatus(target=node), True),
    lambda chance, _: (Throttle(share=round(chance.uniform(0.1, 0.5), 2)), True),
    lambda chance, _: (BadEvents(delay=round(chance.uniform(0, 5), 1), double=0.3, drop=0.1), True),
    lambda _, node: (CorruptReplica(target=node), False),
)
_NAMESPACES: Final[tuple[_Maker, ...]] = (
    lambda _, node: (Partition(target=node), True),
    lambda chance, node: (SlowNetwork(target=node, megabits=round(chance.uniform(1, 50), 1)), True),
)


class _Clear(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fault: str
    name: str = ""


_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class _Timing(msgspec.Struct, frozen=True):
    at_seconds: _Seconds
    within_seconds: _Seconds = 0.0
    lasts_seconds: _Seconds | None = None


_TIMING: Final = msgspec.json.Decoder(_Timing)
_CLEAR: Final = msgspec.json.Decoder(_Clear)


def generate(*, seed: int, minutes: float, nodes: int, has_namespaces: bool) -> list[Moment]:
    """Make a script.

    Args:
        seed: equal arguments give equal scripts.
        minutes: how long it goes on.
        nodes: instances that run.
        has_namespaces: lines can be cut and slowed.

    Returns:
        What happens, in order; the last line clears what lasts. Each kind that is used comes equally often, give or
        take one.
    """
    chance = random.Random(f"{seed}/{minutes}/{nodes}/{has_namespaces}")
    ends = minutes * 60
    count = max(1, int((ends - FIRST_SECONDS) / SECONDS_PER_FAULT))
    makers = [*_LOOPBACK, *(_NAMESPACES if has_namespaces else ())]
    rounds = [make for _ in range(count // len(makers) + 1) for make in chance.sample(makers, len(makers))]
    moments: list[Moment] = []
    for make in rounds[:count]:
        at = round(chance.uniform(FIRST_SECONDS, ends), 1)
        fault, lasts = make(chance, str(chance.randrange(nodes)))
        moments.append(Moment(at_seconds=at, fault=fault))
        if lasts:
            moments.append(Moment(at_seconds=round(at + chance.uniform(*LASTS), 1), clears=name_of(fault)))
    moments.sort(key=lambda moment: moment.at_seconds)
    return [*moments, Moment(at_seconds=max(ends, moments[-1].at_seconds))]


def encode(moments: Sequence[Moment]) -> bytes:
    """Return a script as JSON, a line each."""
    lines = [msgspec.json.encode(_flat(moment)).decode() for moment in moments]
    return ("[\n" + ",\n".join(lines) + "\n]\n").encode()


def read(path: Path) -> list[Moment]:
    """Read a script.

    Args:
        path: JSON; or YAML, where `pyyaml` is installed.

    Returns:
        What happens, in order.

    Raises:
        FaultRefused: it is none; says which line of it.
    """
    try:
        content: Any = _yaml(path) if path.suffix in (".yaml", ".yml") else msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise FaultRefused(f"{path} is no fault script: {error}") from error
    if not isinstance(content, list):
        raise FaultRefused(f"{path} is no fault script: it is no list")
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
    tell: Callable[[Moment, Effect | FaultRefused | None], None],
) -> None:
    """Let everything in a script happen at its time; what is refused is told and left out.

    Args:
        moments: in order.
        aim: settles whom a fault means now: one fault for each instance.
        inject: lets a fault happen.
        clear: undoes what lasts of one kind of fault, or of all.
        wait_until: returns at a time, seconds since the start, or later; with the time that it is then.
        tell: is told each line and what came of it, of each instance that is meant; None where something was cleared.
    """
    order = itertools.count()  # of two lines at the same time the first comes first
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
                tell(moment, refused)
            continue
        for outcome in outcomes:
            tell(moment, outcome if isinstance(outcome, Effect | FaultRefused) else None)
        if moment.fault and moment.lasts_seconds is not None:
            over = Moment(at_seconds=round(now + moment.lasts_seconds, 3), clears=name_of(moment.fault))
            heapq.heappush(due, (over.at_seconds, next(order), over))


def role_of(moment: Moment) -> roles.Role | None:
    """Return the role that a line's target names; None where it names none."""
    return roles.parse(getattr(moment.fault, "target", ""))


def _struck(
    fault: AnyFault, aim: Callable[[AnyFault], Sequence[AnyFault]], inject: Callable[[AnyFault], Effect]
) -> Sequence[Effect | FaultRefused]:
    """Return what came of a fault for each who is meant; raises the first refusal where nothing was done to anybody."""
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
    said = {name: value for name, value in msgspec.to_builtins(moment.fault).items() if name != "fault"}
    unsaid = msgspec.to_builtins(type(moment.fault)())
    changed = {name: value for name, value in said.items() if value != unsaid[name]}
    timing = {"within_seconds": moment.within_seconds or None, "lasts_seconds": moment.lasts_seconds}
    return {
        "at_seconds": moment.at_seconds,
        "fault": name_of(moment.fault),
        **changed,
        **{name: seconds for name, seconds in timing.items() if seconds is not None},
    }


def _moment(path: Path, number: int, line: object) -> Moment:
    if not isinstance(line, dict):
        raise FaultRefused(f"{path}, line {number} of the script: {line!r} is no fault")
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
            raise FaultRefused(f"nothing of {name_of(fault)} lasts: leave `lasts_seconds` out")
        return Moment(
            at_seconds=timing.at_seconds,
            fault=fault,
            within_seconds=timing.within_seconds,
            lasts_seconds=timing.lasts_seconds,
        )
    except (msgspec.ValidationError, TypeError, FaultRefused) as error:
        raise FaultRefused(f"{path}, line {number} of the script: {error}") from error


def _yaml(path: Path) -> object:
    try:
        return msgspec.yaml.decode(path.read_bytes())
    except ImportError as error:
        raise FaultRefused("a script in YAML needs pyyaml: pip install pyyaml, or write JSON") from error

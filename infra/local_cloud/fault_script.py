"""Fault scripts: which fault happens when. Made from a seed, written down as JSON, played against a local cloud.

    [{"at_seconds": 12.5, "fault": "kill-rank", "target": "2"}, …]

Invariant: a script is everything: equal scripts do the same to equal clouds, whoever made them. Targets are numbers, so that a script fits a cloud
whose instances it has never heard of.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from infra.local_cloud.errors import FaultRefused
from infra.local_cloud.fault_kinds import (
    FAULT,
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


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a script."""

    at_seconds: float
    """After the start of the play."""
    fault: AnyFault | None = None
    """None: something is cleared."""
    clears: str = ""
    """Which kind of fault; empty for all that last."""


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


_AT: Final = msgspec.json.Decoder(Annotated[float, msgspec.Meta(ge=0)])
_CLEAR: Final = msgspec.json.Decoder(_Clear)


def generate(*, seed: int, minutes: float, nodes: int, has_namespaces: bool) -> list[Moment]:
    """Make a script.

    Args:
        seed: equal arguments give equal scripts.
        minutes: how long it goes on.
        nodes: instances that run.
        has_namespaces: lines can be cut and slowed.

    Returns:
        What happens, in order; the last line clears what lasts. Each kind that is used comes equally often, give or take one.
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
    return sorted((_moment(path, number, line) for number, line in enumerate(content, 1)), key=lambda moment: moment.at_seconds)


def play(
    moments: Sequence[Moment],
    *,
    inject: Callable[[AnyFault], Effect],
    clear: Callable[[str], object],
    wait_until: Callable[[float], None],
    tell: Callable[[Moment, Effect | FaultRefused | None], None],
) -> None:
    """Let everything in a script happen at its time; what is refused is told and left out.

    Args:
        moments: in order.
        inject: lets a fault happen.
        clear: undoes what lasts of one kind of fault, or of all.
        wait_until: returns at a time, seconds since the start.
        tell: is told each line and what came of it; None where something was cleared.
    """
    for moment in moments:
        wait_until(moment.at_seconds)
        try:
            outcome = inject(moment.fault) if moment.fault else clear(moment.clears)
        except FaultRefused as refused:
            tell(moment, refused)
        else:
            tell(moment, outcome if isinstance(outcome, Effect) else None)


def _flat(moment: Moment) -> dict[str, Any]:
    if moment.fault is None:
        return {"at_seconds": moment.at_seconds, "fault": "clear", **({"name": moment.clears} if moment.clears else {})}
    said = {name: value for name, value in msgspec.to_builtins(moment.fault).items() if name != "fault"}
    unsaid = msgspec.to_builtins(type(moment.fault)())
    return {"at_seconds": moment.at_seconds, "fault": name_of(moment.fault), **{name: value for name, value in said.items() if value != unsaid[name]}}


def _moment(path: Path, number: int, line: object) -> Moment:
    if not isinstance(line, dict):
        raise FaultRefused(f"{path}, line {number} of the script: {line!r} is no fault")
    fields = {str(name): value for name, value in line.items()}
    try:
        at = _AT.decode(msgspec.json.encode(fields.pop("at_seconds", None)))
        content = msgspec.json.encode(fields)
        if fields.get("fault") == "clear":
            return Moment(at_seconds=at, clears=_CLEAR.decode(content).name)
        return Moment(at_seconds=at, fault=FAULT.decode(content))
    except (msgspec.ValidationError, TypeError) as error:
        raise FaultRefused(f"{path}, line {number} of the script: {error}") from error


def _yaml(path: Path) -> object:
    try:
        return msgspec.yaml.decode(path.read_bytes())
    except ImportError as error:
        raise FaultRefused("a script in YAML needs pyyaml: pip install pyyaml, or write JSON") from error

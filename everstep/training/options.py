"""Finds options that the script sets, and that a restored step replaces.

A restored step brings its options, because a restarted script must repeat its steps. A job that continues another job's
checkpoint may set other values.

    init       `ScriptOptions(…)` reads the values of the script
    snapshot   `state` contains the values on which training is based
    restore    `load` finds the values that differ, and applies those that the script names

Invariant: a learning rate is compared before its schedule, so a restart inside a schedule reports no difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch.optim.optimizer import Optimizer

from everstep.protocol.options import MAX_OPTION_CHARACTERS, MAX_OPTIONS, KeptOption
from everstep.training.errors import SessionMisuse

Options: TypeAlias = dict[str, Any]
_HIDDEN: Final = frozenset({"params", "param_names", "initial_lr", "base_lrs", "last_lr"})
"""Entries that are not options, or that follow from the learning rate."""
_PLAIN: Final = (bool, int, float, str, type(None))


class ScriptOptions:
    """Options of a launch. Options in `from_script` survive a restore. Raises SessionMisuse if one does not exist."""

    def __init__(
        self, optimizers: Mapping[str, Optimizer], schedulers: Mapping[str, Any], from_script: Sequence[str] = ()
    ) -> None:
        self._optimizers = optimizers
        self._schedules = schedulers
        self._from_script = frozenset(from_script)
        self._script = dict(self._read())
        self._base_lrs = {name: list(getattr(each, "base_lrs", ())) for name, each in schedulers.items()}
        known = {path.rpartition(".")[2] for path in self._script}
        if unknown := sorted(self._from_script - known):
            raise SessionMisuse(
                f"options_from_script names {', '.join(unknown)}; the optimizers and schedulers have the options "
                f"{', '.join(sorted(known))}"
            )
        self.state = json.dumps(self._script).encode()
        """The values on which training is based, for a snapshot."""
        self.kept: tuple[KeptOption, ...] = ()
        """The first options with another value than the script's."""

    def load(self, state: bytes) -> None:
        """Compare the restored options with those of `state`'s launch, and apply the named ones."""
        base: Options = json.loads(state)
        differing = {path for path in base.keys() & self._script.keys() if base[path] != self._script[path]}
        applied = {path for path in differing if path.rpartition(".")[2] in self._from_script}
        # Read the rates before the first change, because groups can share a tensor.
        rates = {name: float(group["lr"]) for name, group in self._groups().items() if "lr" in group}
        for path in sorted(applied):
            self._apply(path, base[path], self._script[path], rates)
        self.state = json.dumps(base | {path: self._script[path] for path in applied}).encode()
        self.kept = tuple(
            KeptOption(name=_cut(path), script=_cut(self._script[path]), kept=_cut(base[path]))
            for path in sorted(differing - applied)[:MAX_OPTIONS]
        )

    def _read(self) -> Iterator[tuple[str, Any]]:
        for name, group in self._groups().items():
            for option, value in group.items():
                value = group.get("initial_lr", value) if option == "lr" else value
                if option not in _HIDDEN and (plain := _plain(value)) is not _NOT_PLAIN:
                    yield f"{name}.{option}", plain
        for name, scheduler in self._schedules.items():
            settings = scheduler.state_dict()
            for option, value in settings.items() if isinstance(settings, Mapping) else ():
                is_hidden = option in _HIDDEN or str(option).startswith("_")
                if not is_hidden and (plain := _plain(value)) is not _NOT_PLAIN:
                    yield f"{name}.{option}", plain

    def _groups(self) -> dict[str, dict[str, Any]]:
        """Return the parameter groups by name. A restore can replace the dicts."""
        return {
            f"{name}[{number}]" if number else name: group
            for name, optimizer in self._optimizers.items()
            for number, group in enumerate(optimizer.param_groups)
        }

    def _apply(self, path: str, base: Any, script: Any, rates: Mapping[str, float]) -> None:
        owner, _, option = path.rpartition(".")
        if owner in self._schedules:
            setattr(self._schedules[owner], option, script)
        elif (group := self._groups().get(owner)) is not None:
            if option == "lr":
                self._set_lr(group, rates[owner], base, script)
            else:
                _set(group, option, script)

    def _set_lr(self, group: dict[str, Any], now: float, base: float, script: float) -> None:
        """Scale the learning rate at its place in the schedule, from which schedulers continue."""
        _set(group, "lr", script if now == base or not base else now * (script / base))
        if "initial_lr" in group:
            _set(group, "initial_lr", script)
        for name, scheduler in self._schedules.items():
            if self._base_lrs[name]:
                scheduler.base_lrs = list(self._base_lrs[name])
            if hasattr(scheduler, "_last_lr") and isinstance(getattr(scheduler, "optimizer", None), Optimizer):
                scheduler._last_lr = [each["lr"] for each in scheduler.optimizer.param_groups]


_NOT_PLAIN: Final = object()


def _plain(value: Any) -> Any:
    """Return an option as JSON would return it, or `_NOT_PLAIN` for other objects."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else _NOT_PLAIN
    if isinstance(value, (list, tuple)):
        items = [_plain(each) for each in value]
        return _NOT_PLAIN if any(each is _NOT_PLAIN for each in items) else items
    return value if isinstance(value, _PLAIN) else _NOT_PLAIN


def _set(group: dict[str, Any], option: str, value: Any) -> None:
    if isinstance(group[option], torch.Tensor):
        group[option].fill_(value)
    else:
        group[option] = tuple(value) if isinstance(group[option], tuple) else value


def _cut(value: object) -> str:
    return str(value)[:MAX_OPTION_CHARACTERS]

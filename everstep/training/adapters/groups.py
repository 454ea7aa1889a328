"""Follows the parameter groups of an optimizer, which a script may change while it trains.

    observe   groups of the optimizer ──▶ names of their parameters, if they differ from those at `init`
    load      names ──▶ groups of an optimizer whose script has not repeated the change

Invariant: every parameter that this module follows was registered at `init`, so a restarted script finds it by name.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from everstep.training.errors import CannotResume

GroupNames = tuple[list[str], list[str] | None]
"""Names of a group's parameters in a slot, and the script's `param_names` of torch, if any."""


class ParameterGroups:
    """The parameter groups of one optimizer. `names` has the name in a slot of each registered parameter, by `id`."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self.parameters = self._live()
        self._sizes = self._live_sizes()
        self._initial = self._names = self._named(names)

    def have_changed(self) -> bool:
        """Return whether the script added, removed or moved a parameter or a group since the last `follow`."""
        live = self._live()
        return (
            len(live) != len(self.parameters)
            or not all(map(operator.is_, live, self.parameters))
            or self._live_sizes() != self._sizes
        )

    def follow(self, name: str, names: Mapping[int, str]) -> CannotResume | None:
        """Use the present groups, or return an error if a group has a parameter that was not registered at `init`."""
        for number, group in enumerate(self._optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    return CannotResume(
                        name,
                        f"parameter {place} of group {number}, of shape {list(parameter.shape)}, is not a parameter "
                        "that init() saw, and a restarted script would not have it. Create all parameters before "
                        "init(), and register the modules that contain them",
                    )
        self.parameters, self._sizes, self._names = self._live(), self._live_sizes(), self._named(names)
        return None

    def observe(self) -> list[GroupNames] | None:
        """Return the names of each group's parameters, or None if the groups have the same parameters as at `init`."""
        return None if self._names == self._initial else self._names

    def load(
        self,
        saved: Sequence[GroupNames] | None,
        options: Sequence[Mapping[str, Any]],
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        """Give the optimizer the saved groups and their options. Missing groups are added by `add_param_group`."""
        wanted = self._initial if saved is None else saved
        live = self._optimizer.param_groups
        del live[len(wanted) :]
        present = len(live)
        # First replace the parameters of present groups, because `add_param_group` rejects a parameter that another
        # group still contains.
        for group, (of_group, called) in zip(live, wanted[:present], strict=True):
            group["params"][:] = [parameters[each] for each in of_group]
            if called is not None:
                group["param_names"] = list(called)
        for entries, (of_group, called) in zip(options[present:], wanted[present:], strict=True):
            tensors = [parameters[each] for each in of_group]
            members = tensors if called is None else list(zip(called, tensors, strict=True))
            self._optimizer.add_param_group({**entries, "params": members})
        self.follow("", {id(parameter): name for name, parameter in parameters.items()})

    def _live(self) -> list[torch.Tensor]:
        return list(chain.from_iterable(map(itemgetter("params"), self._optimizer.param_groups)))

    def _live_sizes(self) -> list[int]:
        return list(map(len, map(itemgetter("params"), self._optimizer.param_groups)))

    def _named(self, names: Mapping[int, str]) -> list[GroupNames]:
        return [
            (
                [names[id(each)] for each in group["params"]],
                list(group["param_names"]) if "param_names" in group else None,
            )
            for group in self._optimizer.param_groups
        ]

"""Tries whether an optimizer keeps all of its state where a snapshot finds it.

Two copies of the optimizer get small parameters. The first copy makes some steps. The second copy receives the
parameters, the `state` and the `param_groups` of the first, as after a restore. Then both make one more step, which
must be equal in all bits.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any, Final, cast

import torch
from torch.optim.optimizer import Optimizer

from everstep.training import rng
from everstep.training.attributes import copied
from everstep.training.state_tree import is_same

_STEPS: Final = 3
_SIDE: Final = 4
_MAX_PARAMETERS: Final = 8
_OF_HOOKS: Final = "_optimizer_"


def keeps_all_state(optimizer: Optimizer) -> bool:
    """Return whether a restored copy of an optimizer without steps continues bit for bit. The call changes nothing in
    this process. Raises ValueError if copies would communicate, or free memory of the optimizer. Raises Exception if
    the copies cannot make a step, for example because it needs a closure.
    """
    if type(optimizer).__module__.startswith("torch.distributed."):
        raise ValueError("its step communicates")
    if hasattr(optimizer, "__del__") or type(optimizer).__module__.startswith("deepspeed."):
        raise ValueError("it holds memory outside of Python, which its copies would free")
    with rng.kept(()):
        origin, twin = _small_copy(optimizer), _small_copy(optimizer)
        for number in range(_STEPS):
            _step(origin, number)
        _restore(twin, origin)
        for each in (origin, twin):
            _step(each, _STEPS)
        return is_same(_observed(origin), _observed(twin))


def _small_copy(optimizer: Optimizer) -> Any:
    memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict)}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            shape = [min(size, _SIDE) for size in parameter.shape]
            values = torch.linspace(-1, 1, max(1, torch.Size(shape).numel()), dtype=torch.float32)
            small = values[: torch.Size(shape).numel()].reshape(shape).to(parameter.device, parameter.dtype)
            memo[id(parameter)] = torch.nn.Parameter(small, requires_grad=True)
    made = cast(Any, object.__new__(type(optimizer)))
    for name, value in vars(optimizer).items():
        # A scheduler replaces `step` by a function that calls the step of the script's optimizer.
        if name != "step":
            vars(made)[name] = type(value)() if name.startswith(_OF_HOOKS) else copy.deepcopy(value, memo)
    for group in made.param_groups:
        del group["params"][_MAX_PARAMETERS:]
    return made


def _step(optimizer: Any, number: int) -> None:
    rng.seed(number)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape).to(parameter.device, parameter.dtype)
    optimizer.step()


def _restore(twin: Any, origin: Any) -> None:
    pairs = [*zip(_parameters(twin), _parameters(origin), strict=True)]
    with torch.no_grad():
        for ours, theirs in pairs:
            ours.copy_(theirs)
    twin.state.clear()
    for ours, theirs in pairs:
        if theirs in origin.state:
            twin.state[ours] = copied(origin.state[theirs])
    twin.state |= {key: copied(each) for key, each in origin.state.items() if not isinstance(key, torch.Tensor)}
    for ours, theirs in zip(twin.param_groups, origin.param_groups, strict=True):
        ours |= {key: copied(value) for key, value in theirs.items() if key != "params"}


def _observed(optimizer: Any) -> dict[str, object]:
    """Return the values to compare after a step: parameters, state, options, and plain values in other attributes."""
    others = {key: each for key, each in vars(optimizer).items() if isinstance(each, (int, float, str, torch.Tensor))}
    return {
        "parameters": [each.detach() for each in _parameters(optimizer)],
        "state": [optimizer.state.get(each) for each in _parameters(optimizer)],
        "options": [{key: each for key, each in group.items() if key != "params"} for group in optimizer.param_groups],
        "others": others,
    }


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

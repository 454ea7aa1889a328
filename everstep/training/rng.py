"""Reads, restores and seeds the states of random number generators.

The process's generators are torch's on the CPU and on every CUDA device, numpy's global one, and Python's.

Invariant: `restore(observe())` changes no generator. After `restore(state)`, the generators draw the same numbers as
after the `observe` that returned `state`.
"""

from __future__ import annotations

import random
import struct
from collections import abc
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import xxhash

from everstep.training.errors import CannotResume
from everstep.training.parts import SEARCH_DEPTH, find
from everstep.training.state_tree import Tree

RandomState: TypeAlias = dict[str, Tree]
Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

States: TypeAlias = list[Tree]
"""First the states of all generators of the process, then one state per other generator."""

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_PYTHON_WORDS = struct.Struct("<625I")


def observe(*, with_devices: bool = True) -> RandomState:
    """Return the state of every generator of the process. CUDA's generators synchronize each device in use."""
    version, words, gauss = random.getstate()
    numpy_state = cast("tuple[Any, ...] | dict[str, Any]", np.random.get_state())
    state: RandomState = {
        # Store each state as one bytes object. As a tensor, the state would be copied separately into the snapshot. As
        # 625 integers, its encoding would take longer than all other work at a boundary.
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (numpy_state[0], numpy_state[1].tobytes(), *numpy_state[2:])
        if isinstance(numpy_state, tuple)
        else numpy_state,
        "python": (version, _PYTHON_WORDS.pack(*words), gauss),
    }
    if with_devices and torch.cuda.is_initialized() and torch.cuda.is_available():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: RandomState) -> None:
    """Set every generator of the process to its state from `observe`."""
    torch_state, numpy_state, python_state = state["torch"], state["numpy"], state["python"]
    assert isinstance(torch_state, bytes)
    assert isinstance(python_state, tuple)
    torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))
    if isinstance(numpy_state, tuple):
        algorithm, key, *rest = numpy_state
        np.random.set_state((algorithm, np.frombuffer(key, dtype=np.uint32), *rest))
    else:  # The script has replaced numpy's default bit generator, so the state is no tuple.
        np.random.set_state(numpy_state)  # type: ignore[arg-type]
    version, words, gauss = python_state
    random.setstate((version, _PYTHON_WORDS.unpack(words), gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])  # type: ignore[arg-type]


def seed(number: int) -> None:
    """Seed every generator of this process with a number of 64 bits."""
    torch.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


def seed_on_host(number: int, generators: Iterable[Generator]) -> None:
    """Seed the process's generators on the CPU, but not CUDA's, and further generators, with a number of 64 bits."""
    torch.default_generator.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)
    for generator in generators:
        seed_generator(generator, number)


def derived(state: RandomState, number: int) -> RandomState:
    """Derive generator states from those of another rank, for the rank `number`. Equal arguments give equal states."""
    before = observe()
    try:
        restore(state)
        seed(xxhash.xxh3_64_intdigest(f"{_draw_seed(torch.default_generator)}/{number}".encode()))
        return observe()
    finally:
        restore(before)


def find_generators(roots: Iterable[object], *, depth: int = SEARCH_DEPTH) -> list[Generator]:
    """Return each generator of torch, numpy and Python inside these objects once, as `parts.find`."""
    return find(roots, _is_generator, depth=depth)


def _is_generator(value: object) -> bool:
    return isinstance(value, GENERATORS)


def states(generators: Sequence[Generator]) -> States:
    """Return the state of the process's generators, then the given generators' states."""
    return [observe(with_devices=False), *generator_states(generators)]


def set_states(generators: Sequence[Generator], states: States) -> None:
    """Set all generators to the states that `states` returned for the same generators."""
    for index, state in enumerate(states):
        set_state_at(generators, index, state)


def set_state_at(generators: Sequence[Generator], index: int, state: Tree) -> None:
    """Set the generator at `index` of `states`, where 0 selects the process's generators."""
    if index == 0:
        restore(cast(RandomState, state))
    else:
        set_generator_state(generators[index - 1], state)


@contextmanager
def kept(generators: Sequence[Generator]) -> abc.Generator[None]:
    """Restore the states of the process's generators and of the given generators at the context's end."""
    before = states(generators)
    try:
        yield
    finally:
        set_states(generators, before)


def branch(generators: Sequence[Generator], index: int) -> Tree:
    """Derive a state for another stream of numbers from the generator at `index` of `states`, which keeps its state."""
    with kept(generators):
        if index == 0:
            seed(_draw_seed(torch.default_generator))
            return observe(with_devices=False)
        generator = generators[index - 1]
        seed_generator(generator, _draw_seed(generator))
        return generator_state(generator)


def _draw_seed(generator: Generator) -> int:
    if isinstance(generator, torch.Generator):
        return int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator).item())
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(2**63))
    if isinstance(generator, np.random.RandomState):
        return int(generator.randint(2**31)) << 32 | int(generator.randint(2**31))
    return generator.getrandbits(63)


def kind_of(generator: Generator) -> str:
    """Return a generator's kind. Generators of one kind can take each other's states."""
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device}"
    if isinstance(generator, np.random.Generator):
        return f"numpy {type(generator.bit_generator).__name__}"
    return f"{type(generator).__module__}.{type(generator).__qualname__}"


def followed(found: list[Generator], known: Sequence[Generator], path: str) -> list[Generator]:
    """Return `found`. Raises CannotResume if their number or a kind differs from that of `known`."""
    if (kinds := [*map(kind_of, found)]) != (before := [*map(kind_of, known)]):
        raise CannotResume(
            path,
            f"its random generators are {', '.join(kinds) or 'none'} now, and were {', '.join(before) or 'none'} at "
            "init(). Create all generators before init(), and seed one again instead of replacing it",
        )
    return found


def generator_state(generator: Generator) -> Tree:
    """Return the state of one random generator as a state tree."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.getstate()


def set_generator_state(generator: Generator, state: Tree) -> None:
    """Set a random generator to a state that `generator_state` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(cast(torch.Tensor, state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = cast("dict[str, object]", state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(cast("tuple[str, np.ndarray[tuple[int], np.dtype[np.uint32]], int, int, float]", state))
    else:
        generator.setstate(cast("tuple[object, ...]", state))


def generator_states(generators: Iterable[Generator]) -> list[Tree]:
    """Return the state of each random generator, in the order of `generators`."""
    return [generator_state(generator) for generator in generators]


def set_generator_states(generators: Sequence[Generator], states: Sequence[Tree]) -> None:
    """Set each random generator to its state in `states`, a result of `generator_states`."""
    for generator, state in zip(generators, states, strict=True):
        set_generator_state(generator, state)


def seed_generator(generator: Generator, number: int) -> None:
    """Seed one random generator with a number of 64 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, np.random.Generator):
        kind = cast("Callable[[int], np.random.BitGenerator]", type(generator.bit_generator))
        generator.bit_generator.state = kind(number).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(number & 0xFFFFFFFF)
    else:
        generator.seed(number)

"""The process's random number generators: torch (CPU and every CUDA device), numpy's global one and Python's.

Invariant: `restore(observe())` changes nothing, and numbers drawn after it are those that would have been drawn after `observe`.
"""

from __future__ import annotations

import random
import struct
from typing import TypeAlias

import numpy as np
import torch

from everstep.training.state_tree import Tree

RandomState: TypeAlias = dict[str, Tree]
_PYTHON_WORDS = struct.Struct("<625I")


def observe(*, with_devices: bool = True) -> RandomState:
    """Return the state of every generator as a tree.

    Args:
        with_devices: include CUDA's, which costs a synchronization of each device that was used.

    Returns:
        A tree for `state_tree.encode`.
    """
    version, words, gauss = random.getstate()
    state: RandomState = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        # As one piece: 625 separate integers would cost more than everything else at a boundary.
        "python": (version, _PYTHON_WORDS.pack(*words), gauss),
    }
    if with_devices and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: RandomState) -> None:
    """Set every generator to what `observe` returned."""
    torch.set_rng_state(state["torch"])  # type: ignore[arg-type]
    np.random.set_state(state["numpy"])  # type: ignore[arg-type]
    python = state["python"]
    assert isinstance(python, tuple)
    version, words, gauss = python
    random.setstate((version, _PYTHON_WORDS.unpack(words), gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])  # type: ignore[arg-type]


def seed(number: int) -> None:
    """Seed every generator of this process.

    Args:
        number: 64 bits.
    """
    torch.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)

"""Tracks the sources of a snapshot (the live tensors that it copies): their current memory and their changes.

Usually, the tensor objects are those of the previous boundary. A few calls then check thousands of tensors.

Invariant: for each source, an alias keeps the memory of the newest boundary allocated, even if the script moves it.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress

import torch

from everstep.training.capture import StateTensor
from everstep.training.state_tree import PLAIN_CLASSES, tensor_bytes

COMPARED_BYTES = 8 * 1024 * 1024
"""Pieces in which a comparison moves a copy to the device of the live tensor."""
# Call memcmp through ctypes, which releases the interpreter's lock. torch.equal on bytes is several times slower.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, slots=True)
class Marks:
    """Versions and addresses of tensors at one moment. Different marks show that a tensor has changed. They miss writes
    through `.data`, a numpy view or a kernel of the script, and an in-place operation that still runs.
    """

    versions: list[int]
    addresses: list[int]


class Sources:
    """The live tensors that a snapshot copies at one time, in the order of the capture plan."""

    def __init__(self, tensors: Sequence[tuple[int, StateTensor]]) -> None:
        self.positions = [position for position, _ in tensors]
        self.names = [state.name for _, state in tensors]
        self.live = [state.tensor for _, state in tensors]
        self.aliases = [tensor.detach() for tensor in self.live]
        counted = [(name, state.tensor) for name, (_, state) in zip(self.names, tensors, strict=True)]
        counted += [(state.name, state.wrapper) for _, state in tensors if state.wrapper is not None]
        # Leave out inference tensors, because torch keeps no version counter for them.
        counted = [(name, tensor) for name, tensor in counted if not tensor.is_inference()]
        self._counted_names = [name for name, _ in counted]
        self._counted = [tensor for _, tensor in counted]
        self.has_wrappers = any(state.wrapper is not None for _, state in tensors)

    def renew(self) -> bool:
        """Update the aliases of moved tensors. Return False if a shape or dtype needs a new capture plan."""
        if all(map(torch.Tensor.is_set_to, self.live, self.aliases)):
            return True
        for number, (tensor, alias) in enumerate(zip(self.live, self.aliases, strict=True)):
            if not tensor.is_set_to(alias):
                if tensor.shape != alias.shape or tensor.dtype != alias.dtype:
                    return False
                self.aliases[number] = tensor.detach()
        return True

    def marks(self) -> Marks:
        """Return the current version and address of each tensor."""
        return Marks([tensor._version for tensor in self._counted], list(map(torch.Tensor.data_ptr, self.live)))

    def moved(self, since: Marks) -> list[str]:
        """Return the names of tensors whose version or address has changed since `marks` returned `since`."""
        now = self.marks()
        if now == since:
            return []
        changed = set(compress(self._counted_names, map(operator.ne, since.versions, now.versions)))
        changed.update(compress(self.names, map(operator.ne, since.addresses, now.addresses)))
        return [name for name in self.names if name in changed]

    def differing(self, copies: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of tensors whose bytes differ from their copies, so that NaN equals itself."""
        return [
            name
            for name, tensor, copy in zip(self.names, self.live, copies, strict=True)
            if not _is_equal(tensor, copy)
        ]


def _is_equal(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    if type(tensor) in PLAIN_CLASSES and tensor.device.type == "cpu" and tensor.is_contiguous():
        size = tensor.numel() * tensor.element_size()
        return size == copy.numel() * copy.element_size() and _memcmp(tensor.data_ptr(), copy.data_ptr(), size) == 0
    if tensor.is_contiguous() and tensor.nbytes == copy.nbytes:
        return _is_equal_there(tensor_bytes(tensor), tensor_bytes(copy))
    return torch.equal(tensor_bytes(tensor).cpu(), tensor_bytes(copy))


def _is_equal_there(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Return whether tensor and copy are equal, on the tensor's device piece by piece."""
    # Moving the tensor to the host would need new host memory. The host compares only if the device lacks memory.
    try:
        pieces = zip(torch.split(tensor, COMPARED_BYTES), torch.split(copy, COMPARED_BYTES), strict=True)
        return all(torch.equal(there, here.to(there.device)) for there, here in pieces)
    except torch.cuda.OutOfMemoryError:
        return torch.equal(tensor.cpu(), copy)


def same_tensors(one: Collection[torch.Tensor], other: Collection[torch.Tensor]) -> bool:
    """Return whether two lists contain the same tensor objects in the same order."""
    return one is other or (len(one) == len(other) and all(map(operator.is_, one, other)))

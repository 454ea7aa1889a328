"""Provides the tensors of a snapshot by name, and copies them into live tensors in a restore.

Looking up a tensor and creating its view takes a few microseconds, and several times longer right after a large copy,
which replaces the content of the processor's caches. `SavedTensors` therefore first collects many copies, and then
executes them together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch

from everstep.training.copier import Copies
from everstep.training.host_copy import copy_into_live

GATHERED_BYTES = 256 * 1024 * 1024
"""`SavedTensors` collects copies until they have this total size in bytes, and then executes them.

The size is limited, because the script's signal handlers wait while the copies run.
"""


class SavedTensors(Mapping[str, torch.Tensor]):
    """A snapshot's tensors by name. Reading a tensor may wait until the agent has received and verified its bytes.

    Args:
        gathered_bytes: `bring` collects saved tensors until they have this total size, and then copies them together.

    Invariant: when `finish` returns, all copies passed to `bring` are done, in the order of the calls.
    """

    def __init__(self, *, gathered_bytes: int = GATHERED_BYTES) -> None:
        self._gathered_bytes = gathered_bytes
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bytes = 0

    @abstractmethod
    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the saved tensor with this name. May wait until the agent has verified its bytes."""

    def described(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Return the shape and dtype of a saved tensor. May wait until the agent has verified its bytes."""
        saved = self[name]
        return saved.shape, saved.dtype

    def bring(self, name: str, live: torch.Tensor) -> torch.Tensor:
        """Copy a saved tensor into a live tensor, now or together with later copies.

        Args:
            name: a tensor of this mapping.
            live: a tensor of the same shape, on any device. Do not read it before `finish`.

        Returns:
            The live tensor.
        """
        saved = self[name]
        self._copies.append((saved, live))
        self._bytes += saved.nbytes
        if self._bytes >= self._gathered_bytes:
            self.finish()
        return live

    def finish(self) -> None:
        """Execute the collected copies. Afterwards all live tensors passed to `bring` are complete."""
        copies, self._copies, self._bytes = self._copies, [], 0
        copy_into_live(Copies([saved for saved, _ in copies], [live for _, live in copies]))

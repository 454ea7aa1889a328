"""Provides the tensors of a snapshot by name, and copies them into live tensors in a restore.

Looking up a tensor takes a few microseconds, and several times longer right after a large copy. `SavedTensors`
therefore collects many copies, and then executes them together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch

from everstep.training.copier import Copies
from everstep.training.host_copy import copy_into_live

GATHERED_BYTES = 256 * 1024 * 1024
"""Total size of collected copies, limited because the script's signal handlers wait while the copies run."""


class SavedTensors(Mapping[str, torch.Tensor]):
    """A snapshot's tensors by name. Reading one may wait until the agent has received and verified its bytes.
    Invariant: when `finish` returns, all copies passed to `bring` are done, in the order of the calls.
    """

    def __init__(self, *, gathered_bytes: int = GATHERED_BYTES) -> None:
        self._gathered_bytes = gathered_bytes
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bytes = 0

    @abstractmethod
    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the saved tensor with this name."""

    def described(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Return the shape and dtype of a saved tensor."""
        saved = self[name]
        return saved.shape, saved.dtype

    def bring(self, name: str, live: torch.Tensor) -> torch.Tensor:
        """Copy a saved tensor into `live`, of the same shape, now or with later copies until `finish`."""
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

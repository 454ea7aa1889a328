"""The tensors of a snapshot, on their way into the live ones.

To look a tensor up and make its view takes a few microseconds, and several times that right behind a copy that has
taken the processor's caches. So copies are gathered, and made many to a call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch

from everstep.training.copier import Copies
from everstep.training.host_copy import copy_into_live

GATHERED_BYTES = 256 * 1024 * 1024
"""Copied at once, in 25 to 50 ms: so long a script's signal handlers wait."""


class SavedTensors(Mapping[str, torch.Tensor]):
    """A snapshot's tensors by name; to ask for one may be to wait for its bytes.

    Invariant: what was handed to `bring` is there when `finish` has returned, in the order in which it was handed over.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bytes = 0

    @abstractmethod
    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor, as it was saved."""

    def bring(self, saved: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        """Copy one of these into a live one, now or together with others.

        Args:
            saved: as it was found here.
            live: of the same shape, on any device; not read, nor copied from, before `finish`.

        Returns:
            The live one.
        """
        self._copies.append((saved, live))
        self._bytes += saved.nbytes
        if self._bytes >= GATHERED_BYTES:
            self.finish()
        return live

    def finish(self) -> None:
        """Make the copies that were gathered."""
        copies, self._copies, self._bytes = self._copies, [], 0
        copy_into_live(Copies([saved for saved, _ in copies], [live for _, live in copies]))

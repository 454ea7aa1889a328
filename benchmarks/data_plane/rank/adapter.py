"""Operations of a system under test."""

from __future__ import annotations

from typing import Protocol

import torch


class Adapter(Protocol):
    """One rank of one system.

    It is created with (state, meeting, a folder on tmpfs that both ranks see) and called by the training thread. Only
    the operations that `System.metrics` names are called.
    """

    gives_back_own_state: bool
    """Whether `restore_peer` restores the rank's own state; False: it restores rank 0's, as for a joining replica."""

    def snapshot(self, step: int, /) -> None:
        """Start to keep the present state; return when the system lets the script continue."""

    def fence(self) -> None:
        """Return when the state may change, before the next optimizer step."""

    def protect(self) -> None:
        """Return when the last snapshot is as safe as the system makes it: on the peer, or in its file."""

    def replica(self) -> list[torch.Tensor]:
        """Return this rank's tensors of the other rank's last snapshot, in the order of `State.dump`."""

    def restore_local(self) -> None:
        """Restore the last snapshot into the model from this node."""

    def restore_peer(self) -> None:
        """Restore it from the other node. Both ranks call this; rank 1 has lost everything."""

    def close(self) -> None:
        """End the system."""

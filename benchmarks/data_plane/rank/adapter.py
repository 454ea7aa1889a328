"""Defines the interface through which the measured training loop calls a compared system."""

from __future__ import annotations

from typing import Protocol

import torch


class Adapter(Protocol):
    """The operations of a compared system on one rank.

    The constructor receives the state, the `Meeting` of both ranks, and a folder on tmpfs for both. The training thread
    calls only operations that `System.metrics` need.
    """

    gives_back_own_state: bool
    """True: `restore_peer` restores the caller's state. False: rank 0's state on rank 1, as torchft does."""

    def snapshot(self, step: int, /) -> None:
        """Start a snapshot. Return when the system allows the script to continue."""

    def fence(self) -> None:
        """Wait until the optimizer may change the state. Called before each optimizer step."""

    def protect(self) -> None:
        """Wait until the last snapshot is in the system's safest place: another node's memory, or a file."""

    def replica(self) -> list[torch.Tensor]:
        """Return this rank's copy of the other rank's last snapshot, in the order of `State.dump`."""

    def restore_local(self) -> None:
        """Restore the last snapshot from this node's memory into the model."""

    def restore_peer(self) -> None:
        """Restore the last snapshot from the other node's memory.

        Both ranks call this, after rank 1 lost everything.
        """

    def close(self) -> None:
        """End the system's threads and processes."""

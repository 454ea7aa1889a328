"""Defines the interface through which the measured training loop calls a compared system."""

from __future__ import annotations

from typing import Protocol

import torch


class Adapter(Protocol):
    """The operations of a compared system on one rank.

    The constructor's arguments are the state, the `Meeting` that synchronizes both ranks, and a folder on tmpfs that
    both ranks can read. The training thread calls only the operations that the system's `System.metrics` need.
    """

    gives_back_own_state: bool
    """True: `restore_peer` restores the state of the rank that calls it.

    False: it restores rank 0's state on rank 1, as torchft does when a running process sends its state to a new one.
    """

    def snapshot(self, step: int, /) -> None:
        """Start a snapshot of the current state. Return when the system allows the training script to continue."""

    def fence(self) -> None:
        """Wait until the optimizer may change the state. Called before each optimizer step."""

    def protect(self) -> None:
        """Wait until the last snapshot is in the safest place that the system offers.

        Depending on the system, this place is the memory of the other node or a file.
        """

    def replica(self) -> list[torch.Tensor]:
        """Return this rank's copy of the other rank's last snapshot: its tensors, in the order of `State.dump`."""

    def restore_local(self) -> None:
        """Restore the last snapshot from this node's memory into the model."""

    def restore_peer(self) -> None:
        """Restore the last snapshot from the other node's memory. Both ranks call this method.

        The benchmark has discarded rank 1's state and snapshots before the call.
        """

    def close(self) -> None:
        """End the system's threads and processes."""

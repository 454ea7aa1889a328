"""What a system must do to be measured."""

from __future__ import annotations

from typing import Protocol

import torch


class Adapter(Protocol):
    """One rank of one system.

    Made with (state, meeting, folder on tmpfs that both ranks see); called by the training thread.

    Only what `System.metrics` names is called: a system offers the rest or not.
    """

    gives_back_own_state: bool
    """`restore_peer` brings back the rank's own state; False: it brings rank 0's, as to a replica that joins."""

    def snapshot(self, step: int, /) -> None:
        """Begin to keep the present state; returns when the system lets the script train on."""

    def fence(self) -> None:
        """Return when the state may change: what the system needs before the next optimizer step."""

    def protect(self) -> None:
        """Return when the last snapshot is as safe as the system makes it: on the peer, or in its file."""

    def replica(self) -> list[torch.Tensor]:
        """Return the tensors that this rank holds of the other one's last snapshot, in the order of `State.dump`."""

    def restore_local(self) -> None:
        """Bring the last snapshot back into the model from this node."""

    def restore_peer(self) -> None:
        """Bring it back from the other node, which serves it: both ranks call it, rank 1 is the one that lost everything."""

    def close(self) -> None:
        """End."""

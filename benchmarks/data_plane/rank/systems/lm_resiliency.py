"""Adapter of lm-resiliency: each of two processes holds its own snapshot and a copy of the other's, as in GEMINI."""

from __future__ import annotations

import socket
from pathlib import Path

import torch
import torch.distributed as dist
from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig, make_transfer

from benchmarks.data_plane.rank.state import Meeting, State


class LmResiliency:
    gives_back_own_state = True

    def __init__(self, state: State, meeting: Meeting, memory: Path) -> None:
        dist.init_process_group("gloo")
        self._state = state
        self._meeting = meeting
        self._tree = state.tree()
        config = InMemoryCkptConfig(
            interval=1,
            replication_jump=1,
            disk_flush_interval=0,
            disk_folder=str(memory / f"node{meeting.rank}"),
            run_id="bench",
        )
        self._manager = InMemoryCheckpointManager(config)
        self._transfer = make_transfer("torch_dist", rank=meeting.rank)
        self._fetches = 0

    def snapshot(self, step: int) -> None:
        self._tree["step"] = step
        self._manager.save(self._tree, step)

    def fence(self) -> None: ...

    def protect(self) -> None:
        assert self._manager.finalize_replication()

    def _held(self) -> list[torch.Tensor]:
        pool = self._manager._buffer_pool
        newest = max((pool.peer_current, pool.peer_previous), key=lambda slot: slot.step)
        return list(newest.tensors)

    def replica(self) -> list[torch.Tensor]:
        names = [name for name, _ in self._state.tensors()]
        by_place = dict(zip(names, range(len(names)), strict=True))
        # lm-resiliency returns the tensors in the order of `State.tree`: first the model's, then the optimizer's.
        order = [
            *(name for name in names if "." not in name),
            *(name for name in names if "." in name),
        ]
        held = dict(zip(order, self._held(), strict=True))
        return [held[name] for name in sorted(held, key=by_place.__getitem__)]

    def restore_local(self) -> None:
        tree, _ = self._manager.load(mode="latest")
        self._state.load(tree)

    def restore_peer(self) -> None:
        """Restore with lm-resiliency's transfer function, because its own `load` never asks the other node."""
        self._fetches += 1
        key = f"fetch{self._fetches}"
        if self._meeting.rank == 0:
            self._transfer.serve(self._held(), key, 1, socket.gethostname())
        else:
            names = [
                *(t for n, t in self._state.tensors() if "." not in n),
                *(t for n, t in self._state.tensors() if "." in n),
            ]
            self._transfer.fetch(names, key, 0, socket.gethostname())

    def close(self) -> None:
        self._manager.close()

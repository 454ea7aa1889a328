"""Adapter of DeepSpeed's `save_checkpoint` to files on tmpfs, with world size 1: each rank has a complete state."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch

from benchmarks.data_plane.rank.state import Meeting, State


class DeepSpeedSave:
    def __init__(self, state: State, meeting: Meeting, memory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ.update(WORLD_SIZE="1", RANK="0", MASTER_PORT=str(probe.getsockname()[1]))
        import deepspeed

        deepspeed.init_distributed("gloo")
        config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "steps_per_print": 2**31}
        self._engine, *_ = deepspeed.initialize(model=state.module, optimizer=state.optimizer, config=config)
        self._folder = str(memory / f"rank{meeting.rank}")
        self._count = 0

    def snapshot(self, _: int) -> None:
        self._count += 1
        self._engine.save_checkpoint(self._folder, tag=f"step{self._count % 2}")

    def fence(self) -> None: ...

    def protect(self) -> None: ...

    def restore_local(self) -> None:
        with torch.no_grad():
            self._engine.load_checkpoint(self._folder, tag=f"step{self._count % 2}")

    def close(self) -> None: ...

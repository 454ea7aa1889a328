"""Adapter of torch.save into a file on tmpfs, the most common way to checkpoint. No bytes are sent to another node."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.data_plane.rank.state import Meeting, State


class TorchSave:
    def __init__(self, state: State, meeting: Meeting, memory: Path) -> None:
        self._state = state
        self._path = memory / f"rank{meeting.rank}.pt"

    def snapshot(self, _: int) -> None:
        torch.save(self._state.tree(), self._path)

    def fence(self) -> None: ...

    def protect(self) -> None: ...

    def restore_local(self) -> None:
        self._state.load(torch.load(self._path, mmap=True, weights_only=True))

    def close(self) -> None: ...

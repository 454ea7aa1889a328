"""Adapters of torch.distributed.checkpoint's `async_save` to files on tmpfs, without bytes to another node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.data_plane.rank.state import Meeting, State


class DcpAsync:
    writer = AsyncCheckpointerType.THREAD
    is_shared = False

    def __init__(self, state: State, meeting: Meeting, memory: Path) -> None:
        dist.init_process_group("gloo")
        self._state = state
        self._memory = memory
        self._meeting = meeting
        # Set all four options of DCP's staging, because their defaults raise assertions on a machine without a GPU.
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=self.is_shared,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options)
        self._pending: Any = None
        self._count = 0

    def snapshot(self, _: int) -> None:
        self.protect()  # Finish the previous save first, because two saves at a time would need two staging buffers.
        self._count += 1
        # The key contains the rank, because DCP otherwise saves tensors of the same name only once.
        tree = {f"rank{self._meeting.rank}": self._state.tree()}
        self._pending = dcp.async_save(
            tree, checkpoint_id=self._folder, async_checkpointer_type=self.writer, async_stager=self._stager
        )

    @property
    def _folder(self) -> str:
        """Return one of two folders alternately, because a save must not overwrite the last checkpoint."""
        return str(self._memory / f"step{self._count % 2}")

    def fence(self) -> None:
        if hasattr(self._pending, "staging_completion") and self._pending.staging_completion is not None:
            self._pending.staging_completion.result()

    def protect(self) -> None:
        if self._pending is not None:
            self.fence()
            getattr(self._pending, "upload_completion", self._pending).result()
            self._pending = None

    def restore_local(self) -> None:
        dcp.load({f"rank{self._meeting.rank}": self._state.tree()}, checkpoint_id=self._folder)

    def close(self) -> None:
        self._stager.close()


class DcpAsyncProcess(DcpAsync):
    """Adapter with a process as the writer, with which the rank shares memory."""

    writer = AsyncCheckpointerType.PROCESS
    is_shared = True

"""Adapters of torchft's transports to a new process. torchft keeps no copies, so they measure restores only."""

from __future__ import annotations

import datetime
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.checkpointing.pg_transport import PGTransport
from torchft.process_group import ProcessGroupGloo

from benchmarks.data_plane.rank.state import Meeting, State

TIMEOUT = datetime.timedelta(seconds=60)


class TorchftInPlace:
    gives_back_own_state = False

    def __init__(self, state: State, meeting: Meeting, _: Path) -> None:
        self._state = state
        self._meeting = meeting
        if meeting.rank == 0:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            meeting.store.set("torchft", str(self.store.port))
        else:
            self.store = dist.TCPStore("127.0.0.1", int(meeting.store.get("torchft")), is_master=False)
        self._group = ProcessGroupGloo(timeout=TIMEOUT)
        self._group.configure(f"127.0.0.1:{self.store.port}/bench", f"rank{meeting.rank}", meeting.rank, 2)
        self._fetches = 0
        self._transport = self._make()

    def _make(self) -> PGTransport:
        own = self._state.tree()
        return PGTransport(
            self._group, TIMEOUT, torch.device("cpu"), state_dict=(lambda: own) if self._meeting.rank == 1 else None
        )

    def restore_peer(self) -> None:
        self._fetches += 1
        if self._meeting.rank == 0:
            self._transport.send_checkpoint([1], self._fetches, self._state.tree(), TIMEOUT)
        else:
            self._transport.recv_checkpoint(0, "<n/a>", self._fetches, TIMEOUT)

    def close(self) -> None: ...


class TorchftHttp(TorchftInPlace):
    """Adapter of torchft's HTTP transport in four parallel chunks, which are then copied into the live tensors."""

    def _make(self) -> HTTPTransport:
        return HTTPTransport(TIMEOUT, 4)

    def restore_peer(self) -> None:
        self._fetches += 1
        key = f"http{self._fetches}"
        if self._meeting.rank == 0:
            self._transport.send_checkpoint([1], self._fetches, self._state.tree(), TIMEOUT)
            self.store.set(key, self._transport.metadata().replace(socket.gethostname(), "localhost"))
            self.store.wait([f"{key}/taken"])
            self._transport.disallow_checkpoint()
        else:
            where = self.store.get(key).decode()
            self._state.load(self._transport.recv_checkpoint(0, where, self._fetches, TIMEOUT))
            self.store.set(f"{key}/taken", "1")

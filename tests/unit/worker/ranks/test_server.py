"""Tests who may connect to the agent's socket for ranks."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from worker.ranks.server import RankServer
from worker.shm.held_files import HeldFiles


async def test_a_process_of_another_user_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = RankServer(tmp_path / "ranks.sock", HeldFiles())
    await ranks.start()
    agents_uid = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: agents_uid)
    reader, writer = await asyncio.open_unix_connection(str(ranks.path))
    assert await reader.read() == b""
    writer.close()
    await ranks.close()
    assert ranks.refused_count == 1

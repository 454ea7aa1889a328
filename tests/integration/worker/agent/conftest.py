"""Fixture: a fleet of three agents, with their sockets in a folder with a short path."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep.protocol.ids import NodeId
from tests.fakes.storage import MemoryObjectStore
from tests.integration.worker.agent.fleet import BUCKET, ControlPlane, Fleet, Node, source_archive

NODE_COUNT = 3


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    objects = MemoryObjectStore(BUCKET)
    folder = Path("/dev/shm") / f"everstep-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    async with ControlPlane().serve() as control:
        nodes = []
        for index in range(NODE_COUNT):
            state_dir = tmp_path / f"node-{index}"
            sockets = folder / f"{index}"
            for each in (state_dir, sockets):
                each.mkdir()
            nodes.append(Node(NodeId(f"i-{index}"), state_dir, sockets, objects, control))
        for node in nodes:
            node.start()
        try:
            yield Fleet(control, nodes, objects, source_archive(objects))
        finally:
            for node in nodes:
                await node.gone()
                node.shim.switch_off()
            shutil.rmtree(folder)

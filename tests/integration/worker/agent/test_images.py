"""An instance that boots from an image of a running node joins as a new node."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from everstep.protocol.ids import NodeId
from tests.integration.worker.agent.fleet import Fleet, Node, until

pytestmark = pytest.mark.integration


async def test_an_instance_of_an_image_of_a_running_node_joins_as_a_new_one(fleet: Fleet, tmp_path: Path) -> None:
    """An image contains another node's session, port and promise. An instance of this image ignores them."""
    await fleet.launch()
    await fleet.train(3)
    imaged = fleet.nodes[0]
    state = Path(shutil.copytree(imaged.state_dir, tmp_path / "image"))
    assert {"promise", "session_token", "peer_identity", "peer_port", "sources", "logs"} <= {
        path.name for path in state.iterdir()
    }
    (sockets := imaged.sockets.with_name("new")).mkdir()
    new = Node(NodeId("i-new"), state, sockets, fleet.objects, fleet.control)
    new.start()
    try:
        await until("its first report", lambda: new.id in fleet.control.reports)
        assert fleet.control.tokens[-1] == "Bearer join"
        assert (fleet.control.reports[new.id].member, fleet.control.reports[new.id].sources) == (None, ())
        await until("its own certificate", (state / "peer_identity").exists)
        kept = {path.name for path in state.rglob("*") if path.is_file()}
        assert kept == {"node_id", "session_token", "peer_identity", "peer_port", "shim.lock"}
        for own in ("peer_identity", "peer_port"):
            assert (state / own).read_bytes() != (imaged.state_dir / own).read_bytes()
        await fleet.train(5)
    finally:
        await new.gone()
        new.shim.switch_off()

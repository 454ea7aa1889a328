"""The user of an agent's ranks may access only the files that these ranks need.

The agent gives this user access to its socket, over which it sends the files of this user's ranks.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.protocol.ids import RunId
from tests.integration.worker.agent.fleet import RUN, Fleet, until
from worker.node.rank_user import RankUser
from worker.ranks.files import make_home

pytestmark = pytest.mark.integration
USER = RankUser(os.getuid() or 61_244, os.getgid() or 61_245)
"""User of the ranks. Tests that run as root may choose any user, and all other tests must use their own user.

The end of a job removes this user's files in /tmp, so no other test may use the same user.
"""


def opened(root: Path) -> dict[str, int]:
    """Return the paths below a folder to which the ranks' group has access, with their modes."""
    found = {str(path.relative_to(root)): path.stat() for path in [root, *root.rglob("*")]}
    return {
        name: told.st_mode & 0o777 for name, told in found.items() if told.st_gid == USER.gid and told.st_mode & 0o070
    }


async def test_agents_open_what_their_ranks_need_and_nothing_else(fleet: Fleet) -> None:
    for node in fleet.nodes:
        await node.stop()
        node.settings = replace(node.settings, rank_user=USER, exposure="told at the start")
        node.start()
    await fleet.launch()
    await fleet.train(3)
    for node in fleet.nodes:
        assert opened(node.sockets) == {".": 0o710, "ranks.sock": 0o660}
        assert opened(node.state_dir / "sources")["."] == 0o710
        assert fleet.control.reports[node.id].exposure == "told at the start"
    home = Path(make_home(fleet.nodes[0].state_dir, RunId(RUN), USER)["HOME"])
    (home / "cache").touch()
    await fleet.release()
    await until("the home to go", lambda: not home.exists())


async def test_what_a_restarted_agent_finds_is_opened_again(fleet: Fleet) -> None:
    """A restarted agent gives the ranks' user access to the files of its running ranks.

    Before the restart, the agent had no setting for such a user.
    """
    await fleet.launch()
    await fleet.train(2)
    node = fleet.nodes[0]
    assert opened(node.sockets) == {}
    await node.stop()
    node.settings = replace(node.settings, rank_user=USER)
    node.start()
    await until("the socket", lambda: opened(node.sockets) == {".": 0o710, "ranks.sock": 0o660})

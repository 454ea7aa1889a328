"""The state directory of an agent records the node to which it belongs.

An instance that was launched from another node's image finds that node's state. Its agent deletes the state, and the
next agent completes an interrupted deletion.
"""

from __future__ import annotations

import errno
import fcntl
import logging
from pathlib import Path

import pytest

from everstep.protocol.ids import NodeId
from worker.errors import ShimUnavailable
from worker.node import state_directory
from worker.node.rank_user import RankUser
from worker.node.state_directory import take

MINE, THEIRS = NodeId("i-1"), NodeId("i-0")
RUN = "ab" * 16
OWN = (
    "promise",
    "promise.new",
    "session_token",
    "session_token.new",
    "peer_port",
    "credentials_port",
    f"ranks/{RUN}.1.0.json",
    "logs/shim.log",
    f"logs/{RUN}/gen=1/rank=0.stdout",
    f"outputs/{RUN}/gen=1/rank=0/model",
    f"homes/{RUN}/.profile",
    "sources/archives/digest.tar.gz",
    f"sources/{RUN}/train.py",
    f"inputs/runs/{RUN}/train/part",
    f"inputs/runs/{RUN}/train.json",
)
ANYBODYS = ("inputs/objects/digest", "packages/layer/package.py", "lost+found/somebody's")


def files(state: Path) -> set[str]:
    return {str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()} - {"shim.lock"}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Return a state directory that contains the state of another node."""
    take(tmp_path, THEIRS)
    for name in (*OWN, *ANYBODYS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for link in ("logs/link", f"outputs/{RUN}/gen=1/rank=0/link"):
        (tmp_path / link).symlink_to(tmp_path / "packages")
    (tmp_path / f"inputs/runs/{RUN}/train").chmod(0o555)  # channels are read-only
    return tmp_path


def test_what_is_this_nodes_stays(image: Path, caplog: pytest.LogCaptureFixture) -> None:
    take(image, THEIRS)
    assert files(image) == {*OWN, *ANYBODYS, "node_id"}
    assert not caplog.records


def test_a_directory_that_does_not_say_whose_it_is_is_this_nodes(image: Path, caplog: pytest.LogCaptureFixture) -> None:
    (image / "node_id").unlink()
    take(image, MINE)
    assert files(image) == {*OWN, *ANYBODYS, "node_id"}
    assert (image / "node_id").read_text() == MINE
    assert not caplog.records


def test_what_belongs_to_another_node_is_dropped_and_told_in_a_line(
    image: Path, caplog: pytest.LogCaptureFixture
) -> None:
    take(image, MINE)
    assert files(image) == {*ANYBODYS, "node_id"}
    assert (image / "node_id").read_text() == MINE
    assert (image / "node_id").stat().st_mode & 0o777 == 0o600
    (record,) = caplog.records
    assert (record.levelno, THEIRS in record.getMessage()) == (logging.WARNING, True)
    (image / "promise").touch()
    take(image, MINE)
    assert (image / "promise").exists(), "it is this node's now"


def test_what_ranks_have_left_elsewhere_goes_with_it(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[RankUser] = []
    monkeypatch.setattr(state_directory, "clear", cleared.append)
    user = RankUser(61_100, 61_100)
    for node_id in (THEIRS, MINE, MINE):
        take(image, node_id, user)
    assert cleared == [user]


@pytest.mark.parametrize("removed_count", range(len(state_directory.BELONGINGS)))
def test_killed_while_it_drops_it_goes_on_at_the_next_start(
    image: Path, monkeypatch: pytest.MonkeyPatch, removed_count: int
) -> None:
    remove, removed = state_directory.remove_tree, []

    def killed(path: Path) -> None:
        if len(removed) == removed_count:
            raise KeyboardInterrupt
        removed.append(path)
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(state_directory, "remove_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            take(image, MINE)
    assert (image / "node_id").read_text() == THEIRS
    take(image, MINE)
    assert files(image) == {*ANYBODYS, "node_id"}


def test_a_name_that_the_disk_does_not_take_begins_nothing(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that cannot write its node's id to the full disk stops before it deletes any state of another node.

    If it deleted the state first and continued, the next agent would find the other node's id and delete this agent's
    own state.
    """

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_directory, "write_durably", full)
    with pytest.raises(OSError, match="No space"):
        take(image, MINE)


def test_a_full_disk_keeps_no_node_from_its_own_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "node_id.new").mkdir()  # a folder in place of the file makes every write of the name fail
    (tmp_path / "promise").touch()
    take(tmp_path, MINE)
    assert (tmp_path / "promise").exists()
    assert "cannot be written yet" in caplog.text


def test_nothing_is_dropped_under_a_shim_that_lives(image: Path) -> None:
    """An agent deletes no state while the shim of another agent uses the state directory. The agent stops.

    This happens if two agents on one machine have the same state directory.
    """
    with (image / "shim.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ShimUnavailable, match=THEIRS):
            take(image, MINE)
    assert files(image) == {*OWN, *ANYBODYS, "node_id"}

"""The state directory of an agent records the node to which it belongs.

An instance that was launched from an image finds the state of another node and drops it, even if the drop is
interrupted.
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
    """Return a state directory as an image of another node contains it."""
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
    remove, removed = state_directory.remove, []

    def killed(path: Path) -> None:
        if len(removed) == removed_count:
            raise KeyboardInterrupt
        removed.append(path)
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(state_directory, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            take(image, MINE)
    assert (image / "node_id").read_text() == THEIRS
    take(image, MINE)
    assert files(image) == {*ANYBODYS, "node_id"}


def test_a_name_that_the_disk_does_not_take_begins_nothing(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent cannot write its node's name to the full disk, and stops before it drops any state of another node.

    If it dropped the state first, the next agent would treat this agent's own promise as another node's, and drop it.
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
    """Two agents on one machine get the same state directory. The second one stops, because the first one's shim
    runs.
    """
    with (image / "shim.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ShimUnavailable, match=THEIRS):
            take(image, MINE)
    assert files(image) == {*OWN, *ANYBODYS, "node_id"}

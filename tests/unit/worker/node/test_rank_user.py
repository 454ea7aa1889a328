"""Tests the operating system's user under which an agent runs its ranks.

The agent chooses this user, refuses some users, and passes the user to other processes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstep.protocol.ids import RunId
from worker.errors import UserRefused
from worker.node import rank_user
from worker.node.rank_user import NUMBER, UID_COUNT, RankUser, choose, create_traversable_dir, make_own, share, user_of
from worker.ranks import contained_program as beside

PEOPLE = {
    "ranks": RankUser(500, 501, (44,), "ranks"),
    "wheel": RankUser(600, 0, (), "wheel"),
    "helper": RankUser(601, 601, (0,), "helper"),
}
NAMES = {0: "root", 500: "ranks", 1000: "me"}


@pytest.fixture(autouse=True)
def _people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_user, "find_user", PEOPLE.get)
    monkeypatch.setattr(rank_user, "user_name_of", NAMES.get)


@pytest.mark.parametrize(
    ("setting", "own_uid", "chosen"),
    [
        (None, 0, RankUser(NUMBER + 1, NUMBER, uid_count=UID_COUNT)),
        ("ranks", 0, PEOPLE["ranks"]),
        ("7000", 0, RankUser(7000, 7000)),
        ("7000:8000", 0, RankUser(7000, 8000)),
        ("root", 0, None),
        ("0", 0, None),
        (None, 1000, None),
        ("me", 1000, None),
        ("1000", 1000, None),
        (None, 4711, None),
    ],
)
def test_root_runs_ranks_as_another_unless_told_otherwise(
    setting: str | None, own_uid: int, chosen: RankUser | None
) -> None:
    assert choose(setting, own_uid) == chosen


@pytest.mark.parametrize(
    ("setting", "own_uid", "words"),
    [
        ("ranks", 1000, "only root can run ranks as ranks; this agent has the uid 1000"),
        ("nobody-of-that-name", 0, "the user nobody-of-that-name does not exist on this node"),
        ("7000:", 0, "the user 7000: does not exist on this node"),
        ("-1", 0, "the user -1 does not exist on this node"),
        ("7000:0", 0, "7000:0 is root, or in root's group"),
        ("wheel", 0, "wheel is root, or in root's group"),
        ("helper", 0, "helper is root, or in root's group"),
    ],
)
def test_who_is_no_user_for_ranks_is_refused(setting: str, own_uid: int, words: str) -> None:
    with pytest.raises(UserRefused) as refused:
        choose(setting, own_uid)
    assert str(refused.value) == words


def test_jobs_users_are_in_the_groups_of_the_user_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEOPLE, rank_user.NAME, RankUser(900, 901, (44,)))
    assert choose(None, 0) == RankUser(NUMBER + 1, 901, (44,), uid_count=UID_COUNT)


def test_a_number_that_is_somebody_elses_is_not_taken_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, NUMBER + UID_COUNT, "somebody")
    with pytest.raises(UserRefused, match=f"the uid {NUMBER + UID_COUNT} belongs to somebody on this node"):
        choose(None, 0)
    assert choose("7000", 0) == RankUser(7000, 7000)


@pytest.mark.security
def test_each_job_of_a_node_has_a_uid_of_its_own(tmp_path: Path) -> None:
    users = RankUser(NUMBER + 1, NUMBER, uid_count=UID_COUNT)
    runs = [RunId(f"run-{number}") for number in range(UID_COUNT)]
    found = [user_of(run, tmp_path, users) for run in runs]
    assert {user.uid for user in found if user is not None} == set(range(NUMBER + 1, NUMBER + 1 + UID_COUNT))
    assert user_of(runs[-1], tmp_path, users) == found[-1], "also after a restart of the agent"
    assert all(user is not None and user.gid == NUMBER and user.uid_count == 1 for user in found)


def test_a_named_user_has_every_job_and_without_one_ranks_are_the_agents(tmp_path: Path) -> None:
    assert user_of(RunId("a"), tmp_path, RankUser(7000, 7000)) == RankUser(7000, 7000)
    assert user_of(RunId("a"), tmp_path, None) is None
    assert list(tmp_path.iterdir()) == []


def test_a_user_is_written_down_and_read_again() -> None:
    assert beside.written(None) == beside.NONE
    for user in (RankUser(1, 2), RankUser(1, 2, (3, 4))):
        assert beside.read_user(beside.written(user)) == user


def test_without_a_user_folders_and_files_stay_this_processs_alone(tmp_path: Path) -> None:
    file = tmp_path / "way" / "file"
    create_traversable_dir(file.parent, None)
    make_own(tmp_path / "own", None)
    file.touch(mode=0o600)
    share(file, None)
    assert [path.stat().st_mode & 0o777 for path in (file.parent, tmp_path / "own", file)] == [0o700, 0o700, 0o600]


def test_a_way_is_its_users_to_go_through_and_made_again_as_it_was(tmp_path: Path) -> None:
    me = RankUser(os.getuid(), os.getgid())  # every user may change the owner of its files to itself
    for _ in range(2):
        create_traversable_dir(tmp_path / "a" / "way", me)
        make_own(tmp_path / "a" / "way" / "own", me)
    way = tmp_path / "a" / "way"
    assert [path.stat().st_mode & 0o777 for path in (way, way / "own")] == [0o710, 0o700]
    (way / "file").touch(mode=0o600)
    share(way / "file", me)
    assert (way / "file").stat().st_mode & 0o777 == 0o660


def test_the_documentation_of_commands_names_the_users_of_ranks() -> None:
    page = (Path(__file__).parents[4] / "docs" / "reference" / "training-jobs.md").read_text()
    text = page.partition("## ExecuteCommand")[2].partition("**Request**")[0]
    assert f"from {NUMBER + 1} to {NUMBER + UID_COUNT}" in " ".join(text.split())

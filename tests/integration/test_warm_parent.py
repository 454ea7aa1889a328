"""Processes that a test's rank has started end together with the rank, even if the rank is killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.ports import ReservedPort
from tests.warm_parent import Launch, WarmParent
from worker.ranks.environment import node_environment
from worker.ranks.shim.preload import is_built

pytestmark = pytest.mark.integration


def begin(directory: str) -> int:
    """Start a process that never ends and write its pid to a file. A rank of the test calls this function.

    The rank itself ends on request.
    """
    pid = os.fork()
    if pid == 0:
        signal.pause()
    Path(directory, "told").write_text(str(pid))
    Path(directory, "asked").read_text()
    return 0


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_a_rank_has_started_ends_with_it(warm_parent: WarmParent, tmp_path: Path, is_killed: bool) -> None:
    for name in ("told", "asked"):
        os.mkfifo(tmp_path / name)
    launch = warm_parent.fork(
        "tests.integration.test_warm_parent:begin",
        str(tmp_path),
        world=1,
        directory=tmp_path,
        environment={},
        result="",
    )
    process = os.pidfd_open(int((tmp_path / "told").read_text()))
    try:
        if is_killed:
            launch.kill()
        else:
            (tmp_path / "asked").write_text("")
        assert launch.wait() == [-signal.SIGKILL if is_killed else 0]
        assert select.select([process], [], [], 30) == ([process], [], []), "it lives"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)


def test_the_ranks_of_jobs_find_the_operator_that_it_has_compiled(warm_parent: WarmParent) -> None:
    assert is_built(Path(node_environment(os.environ, "")["TORCH_EXTENSIONS_DIR"]))


def test_a_launch_that_is_cut_off_lets_go_of_its_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class CutOff(WarmParent):
        def __init__(self) -> None:
            """Create an object that, unlike the real class, starts no process."""

        def ask(self, request: dict[str, Any]) -> dict[str, Any]:
            raise TimeoutError

    made: list[ReservedPort] = []
    monkeypatch.setattr("tests.warm_parent.ReservedPort", lambda: made.append(ReservedPort()) or made[-1])
    with pytest.raises(TimeoutError):
        CutOff().fork("", world=1, directory=tmp_path, environment={}, result="")
    waited = Launch(CutOff(), tmp_path, [], ReservedPort(), "")
    with pytest.raises(TimeoutError):
        waited.wait()
    assert [port._holder.fileno() for port in (*made, waited.port)] == [-1, -1]

"""What a rank of the tests has started ends with it, however it ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

import pytest

from tests.warm_parent import WarmParent

pytestmark = pytest.mark.integration


def begin(directory: str) -> int:
    """In the rank: start a process that ends for nobody, tell of it, and end when that is asked for."""
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
    launch = warm_parent.fork("tests.integration.test_warm_parent:begin", str(tmp_path), world=1, directory=tmp_path, environment={}, result="")
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

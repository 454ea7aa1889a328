"""A demo that is interrupted leaves no process, whatever interrupts it and whenever."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.local_cloud.processes import identify
from tests.warm_parent import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PHASES = {"start": "Everstep demo", "cluster": "·", "submission": "dashboard:", "training": "survivor"}
"""A part of the line after which the demo is interrupted, by phase."""
INTERRUPTIONS = {
    "ctrl_c": signal.SIGINT,
    "term": signal.SIGTERM,
    "closed_terminal": signal.SIGHUP,
    "killed_parent": None,
}
PARENT = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"


def referring_to(directory: Path) -> dict[int, str]:
    """Return the command of each process whose command, working directory or environment names a directory, by pid."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            words = command + (process / "environ").read_bytes() + os.fsencode(os.readlink(process / "cwd"))
        except OSError:  # it has ended, or is a zombie
            continue
        if os.fsencode(directory) in words and int(process.name) != os.getpid():
            found[int(process.name)] = command.replace(bytes(1), b" ").decode(errors="replace")
    return found


def wait_until_ended(pid: int, command: str) -> None:
    with contextlib.suppress(ProcessLookupError), open(os.pidfd_open(pid)) as ended:
        assert select.select([ended], [], [], 60)[0], f"has not ended: {command}"


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("phase", [*reversed(PHASES)])
@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_an_interrupted_demo_leaves_no_process(tmp_path: Path, interruption: str, phase: str) -> None:
    demo = [sys.executable, "-u", str(ROOT / "examples" / "demo" / "demo.py")]
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *demo],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        said = []
        for line in parent.stdout:
            said.append(line)
            if PHASES[phase] in line:
                break
        assert PHASES[phase] in said[-1], said
        (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        process = identify(int(child))
        assert process is not None, said
        if (number := INTERRUPTIONS[interruption]) is None:
            parent.kill()
        else:
            os.killpg(parent.pid, number)
        wait_until_ended(process.pid, "the demo")
        parent.stdout.read()
    # If the demo was killed before it had ended the cluster, the cluster's guardian ends it.
    while left := referring_to(tmp_path):
        for pid, command in left.items():
            wait_until_ended(pid, command)

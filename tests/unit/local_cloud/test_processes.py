"""Tests how processes are identified, and how process trees are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from infra.local_cloud.processes import Process, descendants, end, identify, kill_descendants, marked_with, wait_gone
from tests.unit.local_cloud.served import eventually


@pytest.fixture
def tree() -> Iterator[subprocess.Popen[bytes]]:
    """Start a shell with children and grandchildren. The grandchildren are in a session of their own."""
    with subprocess.Popen(["/bin/sh", "-c", "setsid sh -c 'sleep 1000 & sleep 1000' & sleep 1000 & wait"]) as process:
        eventually(lambda: len(descendants(process.pid)) == 4)
        yield process
        kill_descendants(process.pid)
        process.kill()


def test_a_process_is_not_confused_with_a_later_one_of_its_pid() -> None:
    own = identify(os.getpid())
    assert own is not None
    assert own.is_alive
    former = Process(own.pid, own.start_ticks - 1)
    assert not former.is_alive
    assert not former.send(signal.SIGKILL), "we would not be here"
    assert wait_gone([former], timeout_seconds=0)


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen(["/bin/true"])
    process = identify(child.pid)
    assert process is not None
    assert wait_gone([process], timeout_seconds=5)
    assert not process.is_alive
    assert child.wait() == 0
    assert identify(child.pid) is None
    assert not process.send(signal.SIGTERM)


def test_a_name_with_spaces_and_parentheses_is_read(tmp_path: object) -> None:
    code = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'a) R 1 (b', 0, 0, 0); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in [process.pid for process in descendants(os.getpid())]
        child.kill()


def test_all_descendants_are_killed_but_not_the_root(tree: subprocess.Popen[bytes]) -> None:
    below = descendants(tree.pid)
    root = identify(tree.pid)
    assert root is not None
    root.send(signal.SIGSTOP)  # stop the root process, which would otherwise exit when its children end
    assert kill_descendants(tree.pid) == 4
    assert not any(process.is_alive for process in below)
    assert root.is_alive
    assert kill_descendants(tree.pid) == 0


def test_what_forks_all_the_time_is_killed_as_well() -> None:
    # Each process forks a successor and soon exits. The search must first stop the processes, or it never finds the
    # newest one.
    script = (
        "import os, select\nwhile True:\n    select.select([], [], [], 0.02)\n    if os.fork():\n        os._exit(0)\n"
    )
    code = (
        "import ctypes, subprocess, sys; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); "
        f"subprocess.Popen([sys.executable, '-c', {script!r}]); "
    )
    code += "print(flush=True); import os\nwhile True:\n    os.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as root:
        assert root.stdout is not None
        root.stdout.readline()
        kill_descendants(root.pid)
        # the root process exits when it has no child, because `os.wait` fails
        eventually(lambda: root.poll() is not None)


def test_end_is_polite_first() -> None:
    with subprocess.Popen(
        ["/bin/sh", "-c", "trap 'exit 7' TERM; echo; while :; do sleep 0.01; done"], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = identify(child.pid)
        assert process is not None
        end(process, grace_seconds=10)
        assert child.wait() == 7


def test_end_kills_what_does_not_listen() -> None:
    with subprocess.Popen(
        ["/bin/sh", "-c", "trap '' TERM; echo; while :; do sleep 1000; done"], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = identify(child.pid)
        assert process is not None
        below = descendants(child.pid)
        end(process, grace_seconds=0.05)
        assert child.wait() == -signal.SIGKILL
        assert not any(process.is_alive for process in below)
        end(process, grace_seconds=0)


def test_marked_processes_are_found_by_the_whole_value() -> None:
    mark = f"mark-{os.getpid()}"
    with (
        subprocess.Popen(["/bin/sleep", "1000"], env={"MARK": mark}) as ours,
        subprocess.Popen(["/bin/sleep", "1000"], env={"MARK": mark + "1"}) as other,
    ):
        # Between fork and exec, a child still has its parent's environment and is found too.
        assert eventually(lambda: [process.pid for process in marked_with("MARK", mark)]) == [ours.pid]
        ours.kill()
        other.kill()


ASKED = """
import os, threading
from infra.local_cloud.processes import exit_when_asked
exit_when_asked(with_parent=True)
try:
    print(os.getpid(), flush=True)
    threading.Event().wait()
finally:
    print("ended", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, None], ids=["SIGTERM", "SIGHUP", "parent killed"])
def test_a_program_ends_what_it_started_when_it_is_asked_or_its_parent_is_killed(number: int | None) -> None:
    command = [
        sys.executable,
        "-c",
        "import subprocess, sys; subprocess.run(sys.argv[1:])",
        sys.executable,
        "-c",
        ASKED,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if number is None:
            parent.kill()
        else:
            os.kill(pid, number)
        assert parent.stdout.read() == "ended\n"

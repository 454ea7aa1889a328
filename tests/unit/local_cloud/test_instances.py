"""Tests the process trees that represent instances of the local cloud."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.local_cloud.environment import process_environment
from infra.local_cloud.instance_init import memory_directory, remove_tree
from infra.local_cloud.instances import InstanceRunner, RunningInstance
from infra.local_cloud.processes import descendants, identify
from tests.unit.local_cloud.served import eventually
from tests.unit.worker.node.test_file_trees import nest
from worker.node.rank_user import clear_own_memory

DAEMON = b"#!/bin/sh\n(setsid sh -c 'setsid sleep 1000 & sleep 1000' &)\necho ready\nexec sleep 1000\n"


def instance(tmp_path: Path, user_data: bytes = DAEMON) -> RunningInstance:
    return RunningInstance(instance_id=f"i-{uuid.uuid4().hex}", boot=1, address="127.3.4.5", user_data=user_data)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[InstanceRunner]:
    runner = InstanceRunner(tmp_path, process_environment(str(tmp_path)))
    yield runner
    runner.end_all()


def console(tmp_path: Path, wanted: RunningInstance) -> str:
    return (tmp_path / wanted.instance_id / "console.log").read_text()


def test_deeply_nested_folders_of_an_instance_are_removed(tmp_path: Path) -> None:
    nest(tmp_path / "nodes")
    remove_tree(tmp_path / "nodes")
    assert list(tmp_path.iterdir()) == []


def test_everything_below_an_instance_goes_with_it(runner: InstanceRunner, tmp_path: Path) -> None:
    wanted = instance(tmp_path)
    runner.reconcile([wanted])
    pid = runner.pids()[wanted.instance_id]
    eventually(lambda: len(descendants(pid)) == 4)
    below = [*descendants(pid), identify(pid)]
    memory = memory_directory(wanted.instance_id)
    memory.mkdir(exist_ok=True)
    (memory / "ranks.sock").touch()
    runner.reconcile([wanted])
    assert runner.pids() == {wanted.instance_id: pid}, "what runs is left alone"
    runner.reconcile([])
    assert not any(process and process.is_alive for process in below)
    assert not memory.exists()
    assert runner.pids() == {}


OWN = """
import ctypes, os, sys
from pathlib import Path
from infra.local_cloud.own_memory import make_own_memory
from worker.node.rank_user import clear_own_memory
uid, sockets = int(sys.argv[1]), Path(sys.argv[2])
if uid != os.getuid():
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as a process that began as this user
if make_own_memory(sockets) is None:
    sys.exit("refused")
Path(f"{sockets}-left").touch()
(sockets / "here").touch()
print(*sorted(path.name for path in sockets.parent.iterdir()), sockets.is_mount())
libc = ctypes.CDLL(None)
libc.shmget(7, 4096, 0o1600)  # IPC_CREAT
clear_own_memory(sockets)
print(*sorted(path.name for path in sockets.parent.iterdir()), libc.shmget(7, 4096, 0), sockets.joinpath("here").exists())
"""


@pytest.mark.parametrize("uid", [os.getuid(), 65_534])
def test_an_instance_has_shared_memory_of_its_own_and_a_folder_for_sockets_that_others_see(uid: int) -> None:
    """A user without privileges has it in a user namespace, where the kernel allows these."""
    if uid != os.getuid() and os.getuid():
        pytest.skip("needs root, to become another user")
    sockets = Path("/dev/shm", f"everstep-test-{uuid.uuid4().hex}")
    root = Path(__file__).parents[3]
    try:
        command = [sys.executable, "-c", OWN, str(uid), str(sockets)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
        if done.stderr == "refused\n":
            assert not Path(f"{sockets}-left").exists()
            pytest.skip("this kernel gives the user no namespaces")
        before, after = done.stdout.splitlines() or ("", done.stderr)
        assert before.split() == [sockets.name, f"{sockets.name}-left", "True"]
        assert after.split() == [sockets.name, "-1", "True"], "what ranks left is gone"
        assert (sockets / "here").exists()
        assert not Path(f"{sockets}-left").exists()
    finally:
        remove_tree(sockets)


def test_an_agent_removes_nothing_from_a_shared_memory_that_other_programs_use(tmp_path: Path) -> None:
    (tmp_path / "sockets").mkdir()
    (tmp_path / "of-another-program").touch()
    clear_own_memory(tmp_path / "sockets")
    assert (tmp_path / "of-another-program").exists()


def test_another_boot_is_another_machine(runner: InstanceRunner, tmp_path: Path) -> None:
    wanted = instance(tmp_path)
    runner.reconcile([wanted])
    first = identify(runner.pids()[wanted.instance_id])
    runner.reconcile([replace(wanted, boot=2)])
    assert first is not None
    assert not first.is_alive
    assert runner.pids()[wanted.instance_id] != first.pid


def test_an_instance_outlives_its_user_data_and_says_how_that_ended(runner: InstanceRunner, tmp_path: Path) -> None:
    wanted = instance(tmp_path, b"#!/bin/sh\nexit 3\n")
    runner.reconcile([wanted])
    eventually(lambda: "user data ended with code 3" in console(tmp_path, wanted))
    process = identify(runner.pids()[wanted.instance_id])
    assert process is not None
    assert process.is_alive
    told = tmp_path / wanted.instance_id / "user-data.exit"
    eventually(lambda: told.exists() and told.read_text() == "3")
    runner.reconcile([])
    assert not told.exists(), "only a machine that is there has ended user data"


def test_user_data_of_an_instance_that_is_ended_says_nothing(runner: InstanceRunner, tmp_path: Path) -> None:
    wanted = instance(tmp_path)
    runner.reconcile([wanted])
    eventually(lambda: "ready" in console(tmp_path, wanted))
    runner.reconcile([])
    assert "user data ended" not in console(tmp_path, wanted)


def test_user_data_that_ends_with_its_machine_says_nothing(runner: InstanceRunner, tmp_path: Path) -> None:
    """The user data script of an instance is ended together with its instance. It then writes no exit file.

    An exit file means that the agent ended while its instance was still running.
    """
    wanted = instance(tmp_path)
    runner.reconcile([wanted])
    process = identify(runner.pids()[wanted.instance_id])
    assert process is not None
    eventually(lambda: "ready" in console(tmp_path, wanted))
    os.kill(process.pid, signal.SIGTERM)
    eventually(lambda: not process.is_alive)
    assert not (tmp_path / wanted.instance_id / "user-data.exit").exists()


def test_user_data_that_cannot_run_harms_nobody(runner: InstanceRunner, tmp_path: Path) -> None:
    wanted = instance(tmp_path, b"no interpreter")
    runner.reconcile([wanted])
    eventually(lambda: "Exec format error" in console(tmp_path, wanted))
    runner.reconcile([])


def test_its_files_are_its_owners_alone(runner: InstanceRunner, tmp_path: Path) -> None:
    wanted = instance(tmp_path)
    runner.reconcile([wanted])
    assert (tmp_path / wanted.instance_id).stat().st_mode & 0o777 == 0o700
    assert (tmp_path / wanted.instance_id / "user-data").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_instances_follow_a_dead_cloud(tmp_path: Path, number: signal.Signals) -> None:
    wanted = instance(tmp_path)
    code = (
        "import sys, threading\nfrom pathlib import Path\nfrom infra.local_cloud.instances import *\n"
        f"runner = InstanceRunner(Path({str(tmp_path)!r}), {process_environment(str(tmp_path))!r})\n"
        f"runner.reconcile([RunningInstance(instance_id={wanted.instance_id!r}, boot=1, "
        f"address='127.3.4.5', user_data={DAEMON!r})])\n"
        "print(next(iter(runner.pids().values())), flush=True)\nthreading.Event().wait()\n"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE) as cloud:
        assert cloud.stdout is not None
        pid = int(cloud.stdout.readline())
        eventually(lambda: len(descendants(pid)) == 4)
        left = [*descendants(pid), identify(pid)]
        memory_directory(wanted.instance_id).mkdir(exist_ok=True)
        cloud.send_signal(number)
        cloud.wait()
    eventually(lambda: not any(process and process.is_alive for process in left))
    eventually(lambda: not memory_directory(wanted.instance_id).exists())


def test_init_ends_at_once_when_the_cloud_is_dead_already(tmp_path: Path) -> None:
    script = tmp_path / "user-data"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    script.chmod(0o700)
    not_the_parent = str(os.getppid())
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "infra.local_cloud.instance_init", not_the_parent, "i-0", str(script)], timeout=20
    )
    assert ended.returncode == 1
    assert not (tmp_path / "ran").exists()

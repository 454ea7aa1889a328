"""Instances as process trees: started from user data when EC2 says `running`, gone at once when it does not.

Invariant: what runs is what was last asked for. One thread owns the runner and must live as long as it: an instance dies with the thread that
started it (PR_SET_PDEATHSIG is about threads).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.local_cloud.instance_init import exit_file, remove_memory
from infra.local_cloud.processes import kill_descendants

log = logging.getLogger(__name__)

INIT_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningInstance:
    """An instance that should run now."""

    instance_id: str
    boot: int
    """Grows with every boot: another number means that the machine was started again."""
    address: str
    user_data: bytes


class InstanceRunner:
    """Keeps process trees equal to the instances that should run.

    Args:
        nodes_directory: an instance's own directory is below it; kept after its end, for its logs.
        environment: what every instance's user data gets, before its own variables.
    """

    def __init__(self, nodes_directory: Path, environment: Mapping[str, str]) -> None:
        self._nodes = nodes_directory
        self._environment = dict(environment)
        self._running: dict[str, tuple[RunningInstance, subprocess.Popen[bytes]]] = {}

    def reconcile(self, wanted: Iterable[RunningInstance]) -> None:
        """End what is not wanted, start what is missing; called by the owning thread after every change.

        An instance whose init has died is not started again: EC2 does not notice a machine that has crashed either.
        """
        by_id = {instance.instance_id: instance for instance in wanted}
        for instance_id, (instance, _) in list(self._running.items()):
            if by_id.get(instance_id) != instance:
                self._end(instance_id)
        for instance_id, instance in by_id.items():
            if instance_id not in self._running:
                self._start(instance)

    def pids(self) -> dict[str, int]:
        """Return the pid of each running instance's init."""
        return {instance_id: process.pid for instance_id, (_, process) in self._running.copy().items()}

    def end_all(self) -> None:
        """End every instance."""
        self.reconcile(())

    def _start(self, instance: RunningInstance) -> None:
        directory = self._nodes / instance.instance_id
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        script = self._script(instance.instance_id)
        script.write_bytes(instance.user_data)
        script.chmod(0o700)
        environment = {
            **self._environment,
            "EVERSTEP_INSTANCE_ID": instance.instance_id,
            "EVERSTEP_ADDRESS": instance.address,
            "EVERSTEP_STATE_DIR": str(directory),
        }
        with (directory / "console.log").open("ab") as console:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "infra.local_cloud.instance_init", str(os.getpid()), instance.instance_id, str(script)],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running[instance.instance_id] = (instance, process)
        log.info("%s runs at %s", instance.instance_id, instance.address)

    def _end(self, instance_id: str) -> None:
        """Pull the plug: everything below init is killed first, so that nothing has time to say goodbye; init only reaps."""
        _, process = self._running.pop(instance_id)
        count = kill_descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(INIT_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        remove_memory(instance_id)
        exit_file(self._script(instance_id)).unlink(missing_ok=True)  # it speaks of machines that are there
        log.info("%s is gone with %d processes", instance_id, count)

    def _script(self, instance_id: str) -> Path:
        return self._nodes / instance_id / "user-data"

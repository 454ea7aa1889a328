"""Runs each instance as a process tree, which executes the user data while EC2 reports the instance as `running`.

One thread must make all calls and live as long as the runner, because PR_SET_PDEATHSIG refers to threads: an instance
dies with the thread that started it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path

from infra.local_cloud.instance_init import exit_file, remove_memory
from infra.local_cloud.metadata import MetadataService
from infra.local_cloud.network import Network, listening_socket
from infra.local_cloud.node_faults import burn_in_file, nvml_file, write_gpus
from infra.local_cloud.processes import kill_descendants

log = logging.getLogger(__name__)

INIT_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningInstance:
    """An instance whose processes should run now."""

    instance_id: str
    boot: int
    """If the number changes, the runner restarts the instance's processes."""
    address: str
    user_data: bytes


@dataclass(eq=False, repr=False)
class InstanceRunner:
    """Starts and ends process trees, so that exactly the wanted instances run.

    `nodes_directory` has a directory per instance, which remains after the instance with its logs. `metadata` None:
    instances have no metadata. `network` None: they share this machine's loopback.
    """

    nodes_directory: Path
    environment: InitVar[Mapping[str, str]]
    _: KW_ONLY
    metadata: MetadataService | None = None
    network: Network | None = None

    def __post_init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._running: dict[str, tuple[RunningInstance, subprocess.Popen[bytes]]] = {}

    def reconcile(self, wanted: Iterable[RunningInstance]) -> None:
        """Start missing instances, and end all that are not in `wanted`. The owning thread calls this in each pass.

        An instance whose init process has died stays ended, because EC2 does not restart a crashed machine either.
        """
        by_id = {instance.instance_id: instance for instance in wanted}
        for instance_id, (instance, _) in list(self._running.items()):
            if by_id.get(instance_id) != instance:
                self._end(instance_id)
        for instance_id, instance in by_id.items():
            if instance_id not in self._running:
                self._start(instance)

    def pids(self) -> dict[str, int]:
        """Return the pid of each instance's init process."""
        return {instance_id: process.pid for instance_id, (_, process) in self._running.copy().items()}

    def directory(self, instance_id: str) -> Path:
        """Return an instance's directory."""
        return self.nodes_directory / instance_id

    def end_all(self) -> None:
        """End every instance's processes."""
        self.reconcile(())

    def _start(self, instance: RunningInstance) -> None:
        directory = self.nodes_directory / instance.instance_id
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        script = self._script(instance.instance_id)
        script.write_bytes(instance.user_data)
        script.chmod(0o700)
        environment = {
            **self._environment,
            "EVERSTEP_INSTANCE_ID": instance.instance_id,
            "EVERSTEP_ADDRESS": instance.address,
            "EVERSTEP_STATE_DIR": str(directory),
            "EVERSTEP_NVML_STUB": str(nvml_file(directory)),
            "EVERSTEP_BURN_IN_STUB": str(burn_in_file(directory)),
        }
        write_gpus(directory, ())
        namespace = self.network.attach(instance.instance_id, instance.address) if self.network else None
        if self.metadata:
            listening = listening_socket(instance.address, namespace)
            environment["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = self.metadata.open(instance.instance_id, listening)
        with (directory / "console.log").open("ab") as console:
            process = subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-P",
                        "-m",
                        "infra.local_cloud.instance_init",
                        str(os.getpid()),
                        instance.instance_id,
                        str(script),
                    ),
                    *((str(namespace),) if namespace else ()),
                ],
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
        """End an instance abruptly, as a power failure would."""
        # After SIGTERM, init stores no exit code of the user data. Killing all descendants prevents an
        # orderly shutdown.
        _, process = self._running.pop(instance_id)
        process.send_signal(signal.SIGTERM)
        count = kill_descendants(process.pid)
        try:
            process.wait(INIT_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self.metadata:
            self.metadata.close(instance_id)
        if self.network:
            self.network.detach(instance_id)
        remove_memory(instance_id)
        # Remove the file with the exit code of the user data, because the code belongs to the ended instance.
        exit_file(self._script(instance_id)).unlink(missing_ok=True)
        log.info("%s is gone with %d processes", instance_id, count)

    def _script(self, instance_id: str) -> Path:
        return self.nodes_directory / instance_id / "user-data"

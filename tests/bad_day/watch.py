"""Observes the cluster from outside during a bad day: instance states, and the nodes of each job.

Invariant: the watch changes nothing. It uses only AWS's answers and the public API, and repeats failed requests.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing, suppress
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from everstep.errors import EverstepError
from everstep.failures import translated
from infra.local_cloud import roles
from infra.local_cloud.errors import LocalCloudError
from infra.local_cloud.up import LocalCluster

LOOK_SECONDS: Final = 0.7
THROTTLING: Final = ("Throttling", "RequestLimitExceeded")
DISRUPTED: Final = "Unavailable"
"""Error code with which EC2's Describe operations fail for instances in a disrupted zone."""
GONE: Final = frozenset({"shutting-down", "terminated", "stopping", "stopped"})
Json = dict[str, Any]


class Watch(threading.Thread):
    """Thread that polls AWS and the API until `end`.

    Args:
        cluster: the observed cluster.
        job_names: the observed jobs.
    """

    def __init__(self, cluster: LocalCluster, job_names: list[str]) -> None:
        super().__init__(name="watch", daemon=True)
        self.ended: dict[str, float] = {}
        self.states: dict[str, str] = {}
        self.impaired: dict[str, float] = {}
        """Time of the newest observed failure of a status check, by instance."""
        self.throttled_at = 0.0
        """Newest time at which AWS throttled a call of this watch."""
        self.disrupted_at = 0.0
        """Newest time at which AWS refused a call of this watch because of a disrupted zone."""
        self.jobs: dict[str, Json] = {}
        self._training: dict[str, roles.RoleJob] = {}
        """Newest observation of each job that trains, by name."""
        self._cluster = cluster
        self._names = job_names
        self._over = threading.Event()

    def end(self) -> None:
        """Stop the thread. The call returns after the last poll."""
        self._over.set()
        self.join()

    def run(self) -> None:
        """Poll AWS and the API until `end`."""
        ec2 = self._cluster.aws("ec2")
        while not self._over.wait(LOOK_SECONDS):
            for look in (lambda: self._look_at_instances(ec2), self._look_at_jobs):
                with suppress(ClientError, BotoCoreError, EverstepError, LocalCloudError, OSError):
                    look()

    def _look_at_instances(self, ec2: Any) -> None:
        now = time.time()
        self.states = self._states(ec2)
        for instance_id, state in self.states.items():
            if state in GONE:
                self.ended.setdefault(instance_id, now)
        for status in self._asked(ec2.describe_instance_status)["InstanceStatuses"]:
            if "impaired" in (status["InstanceStatus"]["Status"], status["SystemStatus"]["Status"]):
                self.impaired[status["InstanceId"]] = now

    def _states(self, ec2: Any) -> dict[str, str]:
        answer = self._asked(ec2.describe_instances)
        return {
            instance["InstanceId"]: instance["State"]["Name"]
            for group in answer["Reservations"]
            for instance in group["Instances"]
        }

    def _asked(self, call: Any) -> Json:
        try:
            answer: Json = call()
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code in THROTTLING:
                self.throttled_at = time.time()
            if code == DISRUPTED:
                self.disrupted_at = time.time()
            raise
        if answer["ResponseMetadata"]["RetryAttempts"]:
            self.throttled_at = time.time()
        return answer

    def _look_at_jobs(self) -> None:
        with closing(self._cluster.client()) as client:
            for name in self._names:
                with suppress(EverstepError), translated():
                    self.jobs[name] = client.describe_training_job(TrainingJobName=name)
                    if self.jobs[name]["TrainingJobStatus"] == roles.TRAINS:
                        self._training[name] = roles.training_job(
                            self.jobs[name], client.describe_protection(TrainingJobName=name)
                        )
                    else:
                        self._training.pop(name, None)

    # Methods that strikes call

    def training_jobs(self) -> list[roles.RoleJob]:
        """Return the jobs that were training at the last poll, as targets for faults."""
        return list(self._training.values())

    def described(self) -> set[str]:
        """Ask EC2 once, and return the instances that its answer contains."""
        return set(self._states(self._cluster.aws("ec2")))

    def running(self) -> set[str]:
        """Return the instances that AWS reports as running."""
        return {instance_id for instance_id, state in self.states.items() if state == "running"}

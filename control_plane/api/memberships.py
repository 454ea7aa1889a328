"""Checks for each agent that joins whether its instance is a running member of the fleet's Auto Scaling group.

After a restart of the control plane, all agents of a fleet may join at the same time. Requests about the same group
therefore share one request to AWS. One thread asks AWS about all members of the group, and the other threads wait for
this thread's answer.

Invariant: an agent is rejected only by an answer of AWS to a request that began after the agent connected. An agent may
be admitted by an answer that is up to `SHARED_SECONDS` old.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from control_plane.cloud.operator import CloudOperator, Ec2State
from everstep.protocol.ids import NodeId

SHARED_SECONDS: Final = 5.0
"""Maximum age in seconds at which AWS's answer about an Auto Scaling group may still admit an agent."""


@dataclass(slots=True)
class _Group:
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked_at: float = float("-inf")
    states: Mapping[NodeId, Ec2State] = field(default_factory=dict[NodeId, Ec2State])


class Memberships:
    """AWS's newest answer about the members of each fleet's Auto Scaling group. Thread-safe.

    Args:
        operator: asks AWS about groups and instances.
        monotonic: clock that measures the age of an answer, in seconds.
    """

    def __init__(self, operator: CloudOperator, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._operator = operator
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}

    def state(self, group_name: str, node_id: NodeId) -> Ec2State | None:
        """Return the state of an instance that is a member of a group, as EC2 reports it.

        Args:
            group_name: name of the fleet's Auto Scaling group.
            node_id: the instance on which the agent claims to run.

        Returns:
            The state. None if the group does not have the instance, or is terminating it.

        Raises:
            CloudError: AWS did not answer, or refused the request.
        """
        arrived_at = self._monotonic()
        with self._lock:
            group = self._groups.setdefault(group_name, _Group())
        with group.lock:
            is_running = group.states.get(node_id) is Ec2State.RUNNING
            is_shared = group.asked_at > arrived_at or (is_running and arrived_at - group.asked_at < SHARED_SECONDS)
            if not is_shared:
                asked_at = self._monotonic()
                members = self._operator.describe_group(group_name).members
                instances = self._operator.describe_instances(
                    [member.instance_id for member in members if not member.is_leaving]
                )
                group.states = {id: instance.state for id, instance in instances.items()}
                group.asked_at = asked_at
            return group.states.get(node_id)

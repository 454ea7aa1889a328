"""Checks for each agent that joins whether its instance is a running member of the fleet's Auto Scaling group.

After a restart, all agents may join at once, so requests about a group share one request to AWS. An agent is rejected
only by an answer to a request that began after it connected, but admitted by one up to `SHARED_SECONDS` old.
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
"""Age up to which AWS's answer may admit an agent."""


@dataclass(slots=True)
class _Group:
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked_at: float = float("-inf")
    states: Mapping[NodeId, Ec2State] = field(default_factory=dict[NodeId, Ec2State])


class Memberships:
    """AWS's newest answer about the members of each fleet's group. Thread-safe."""

    def __init__(self, operator: CloudOperator, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._operator = operator
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}

    def state(self, group_name: str, node_id: NodeId) -> Ec2State | None:
        """Return EC2's state of a group's member. None if the instance is no member, or is terminating.

        Raises CloudError if AWS did not answer, or refused the request.
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

"""Emulates instance refreshes of Auto Scaling. It always ends a member before it launches the replacement."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from moto.autoscaling.exceptions import AutoscalingClientError
from moto.autoscaling.models import FakeAutoScalingGroup

from infra.local_cloud.auto_scaling import AutoScaling


class RefreshInProgress(AutoscalingClientError):  # type: ignore[misc]
    """AWS's error for a refresh while another one of the group is in progress."""

    code = "InstanceRefreshInProgress"


@dataclass(slots=True)
class _Refresh:
    """One refresh, with the ids of members that it must still replace."""

    remaining: list[str]
    count: int
    id: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def status(self) -> str:
        return "InProgress" if self.remaining else "Successful"


class InstanceRefreshes:
    """The newest instance refresh of each group. The caller holds the server's lock."""

    def __init__(self, engine: AutoScaling) -> None:
        self._engine = engine
        self._refreshes: dict[str, _Refresh] = {}

    def start(self, group: FakeAutoScalingGroup) -> str:
        """Begin to replace all current members of a group, and return the refresh's id.

        Raises RefreshInProgress if an earlier refresh of the group has not ended.
        """
        earlier = self._refreshes.get(group.arn)
        if earlier is not None and earlier.remaining:
            raise RefreshInProgress("An Instance Refresh is already in progress and blocks the execution of this call.")
        members = [member.instance.id for member in group.instance_states]
        self._refreshes[group.arn] = _Refresh(remaining=members, count=len(members))
        return self._refreshes[group.arn].id

    def describe(self, group: FakeAutoScalingGroup) -> list[dict[str, Any]]:
        """Return a group's newest refresh as DescribeInstanceRefreshes does, or nothing."""
        found = self._refreshes.get(group.arn)
        if found is None:
            return []
        done = found.count - len(found.remaining)
        return [
            {
                "InstanceRefreshId": found.id,
                "AutoScalingGroupName": group.name,
                "Status": found.status,
                "PercentageComplete": 100 * done // found.count if found.count else 100,
                "InstancesToUpdate": len(found.remaining),
            }
        ]

    def reconcile(self) -> None:
        """Terminate the next member in each group whose members are all InService.

        The server calls this in each pass.
        """
        for group in self._engine.groups():
            refresh = self._refreshes.get(group.arn)
            states = [member.lifecycle_state for member in group.instance_states]
            if refresh is None or not refresh.remaining or states != ["InService"] * (group.desired_capacity or 0):
                continue
            old = refresh.remaining.pop(0)
            for member in list(group.instance_states):
                if member.instance.id == old:
                    self._engine.terminate(group, member, decrement=False)

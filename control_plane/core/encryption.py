"""Decides whether the nodes of a generation encrypt the connections between them with TLS.

Many instance types encrypt all traffic within a VPC in hardware, so that TLS would cost processor time for nothing.
Invariant: with `AUTO`, a node uses TLS if its instance type is unknown, or if EC2 did not describe the type.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum


class ReplicaEncryption(StrEnum):
    """Setting of a fleet: when nodes use TLS between them.

    - AUTO: if an instance type of the job's nodes does not encrypt traffic between instances.
    - ON: always.
    - OFF: never.
    """

    AUTO = "Auto"
    ON = "On"
    OFF = "Off"


def is_needed(setting: ReplicaEncryption, instance_types: Collection[str], encrypting_types: Collection[str]) -> bool:
    """Return whether a generation uses TLS. An empty text stands for an unknown instance type."""
    if setting is not ReplicaEncryption.AUTO:
        return setting is ReplicaEncryption.ON
    return not instance_types or not set(instance_types) <= set(encrypting_types)

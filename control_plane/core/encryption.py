"""Decides whether the nodes of a generation encrypt the connections between them with TLS.

Many instance types encrypt all traffic between instances of a VPC in hardware. Between such nodes, TLS would cost
processor time and add no secrecy.

Invariant: with `AUTO`, a node of an unknown instance type uses TLS.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Final


class ReplicaEncryption(StrEnum):
    """Setting of a fleet: when nodes use TLS between them.

    - AUTO: if an instance type of the job's nodes does not encrypt traffic between instances.
    - ON: always.
    - OFF: never.
    """

    AUTO = "Auto"
    ON = "On"
    OFF = "Off"


ENCRYPTING_FAMILIES: Final = frozenset(
    (  # noqa: SIM905  a list would have one line per family
        "c5a c5ad c5n c6a c6gn c6i c6id c6in c7a c7g c7gd c7gn c7i c7i-flex c8a c8g c8gb c8gd c8gn c8i c8i-flex c8id "
        "d3 d3en dl2q f2 g4dn g5 g6 g6e g6f gr6 gr6f hpc6a hpc6id hpc7a hpc7g hpc8a i3en i4g i4i i7i i7ie i8g i8ge "
        "im4gn inf1 inf2 is4gen m5dn m5n m5zn m6a m6i m6id m6idn m6in m7a m7g m7gd m7i m7i-flex m8a m8g m8gb m8gd "
        "m8gn m8i m8i-flex m8id p3dn p4d p4de p5 p5e p5en p6-b200 p6-b300 r5dn r5n r6a r6i r6id r6idn r6in r7a r7g "
        "r7gd r7i r7iz r8a r8g r8gb r8gd r8gn r8i r8i-flex r8id trn1 trn1n trn2 trn2u vt1 x2idn x2iedn x2iezn x8g"
    ).split()
)
"""Instance families that encrypt traffic between instances, in all sizes.

Source: `NetworkInfo.EncryptionInTransitSupported` of EC2's DescribeInstanceTypes. AWS encrypts if both instances are of
such a type, in one VPC, and no virtual device is on the path:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/data-protection.html#encryption-transit
"""


def encrypts_in_transit(instance_type: str) -> bool:
    """Return whether EC2 encrypts the traffic between two instances of this type. False for an unknown type."""
    return instance_type.partition(".")[0] in ENCRYPTING_FAMILIES


def is_needed(setting: ReplicaEncryption, instance_types: Collection[str]) -> bool:
    """Return whether a generation uses TLS.

    Args:
        setting: the value that administrators chose for the fleet. AUTO makes the instance types decide.
        instance_types: the instance types of the generation's nodes. An empty text stands for an unknown type. Empty if
            no type is known.

    Returns:
        True if agents must use TLS. With AUTO, this is the case if any of these types is unknown or does not encrypt
        traffic between instances.
    """
    if setting is not ReplicaEncryption.AUTO:
        return setting is ReplicaEncryption.ON
    return not instance_types or not all(map(encrypts_in_transit, instance_types))

"""Caches EC2's descriptions of instance types, which never change.

Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeInstanceTypes.html
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from control_plane.cloud.connection import translated
from control_plane.cloud.errors import CloudError
from control_plane.cloud.operator import InstanceShape

log = logging.getLogger(__name__)

TYPES_RETRY_SECONDS: Final = 30.0
"""Seconds from a failed call of `InstanceTypes.encrypting` to the next attempt."""


class InstanceTypes:
    """The hardware of instance types. Thread-safe."""

    def __init__(self, ec2: Any, monotonic: Callable[[], float]) -> None:
        self._ec2 = ec2
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._shapes: Mapping[str, InstanceShape] = {}
        self._retry_at = float("-inf")

    def shapes(self, types: Collection[str]) -> Mapping[str, InstanceShape]:
        """Return the hardware of these and further types. Raises `CloudError` if EC2 does not describe one of them."""
        missing = sorted(set(types) - self._shapes.keys())
        if missing:
            with translated():
                pages = self._ec2.get_paginator("describe_instance_types").paginate(InstanceTypes=missing)
                found = {each["InstanceType"]: _shape(each) for page in pages for each in page["InstanceTypes"]}
            with self._lock:
                self._shapes = {**self._shapes, **found}
        return self._shapes

    def encrypting(self, types: Collection[str]) -> frozenset[str]:
        """Return those types that encrypt traffic between instances.

        Raises nothing, because an error of EC2 must not hide a group's state.
        """
        known = self._shapes
        try:
            if self._monotonic() >= self._retry_at:
                known = self.shapes(types)
        except CloudError as error:
            self._retry_at = self._monotonic() + TYPES_RETRY_SECONDS
            log.info("EC2 does not describe the instance types %s: %s", ", ".join(sorted(types)), error.message)
        return frozenset(each for each in types if each in known and known[each].encrypts_in_transit)


def _shape(described: Mapping[str, Any]) -> InstanceShape:
    gpus = (described.get("GpuInfo") or {}).get("Gpus") or ()
    neurons = (described.get("NeuronInfo") or {}).get("NeuronDevices") or ()
    network = described.get("NetworkInfo") or {}
    return InstanceShape(
        accelerator_count=sum(each["Count"] for each in (*gpus, *neurons)),
        efa_count=(network.get("EfaInfo") or {}).get("MaximumEfaInterfaces", 0),
        memory_mib=described["MemoryInfo"]["SizeInMiB"],
        encrypts_in_transit=network.get("EncryptionInTransitSupported", False),
    )

"""Asks EC2 for the facts about instances that never change: network nodes and images.

Invariant: a failed request hides no other fact. The caller repeats requests until EC2 has reported each fact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from datetime import datetime
from typing import TypeVar

from control_plane.cloud.errors import CloudError
from control_plane.cloud.operator import CloudOperator, InstanceState
from control_plane.db.nodes import InstanceFacts
from everstep.protocol.ids import NodeId

Id = TypeVar("Id", bound=str)
Fact = TypeVar("Fact")
Request = Callable[[Collection[Id]], Mapping[Id, Fact]]


class FactReader:
    """EC2's reports about one fleet's instances. One thread asks; other threads may read."""

    def __init__(self) -> None:
        self._asked: set[str] = set()
        self._networks: Mapping[NodeId, tuple[str, ...]] = {}
        self._image_ids: Mapping[NodeId, str] = {}
        self._image_times: Mapping[str, datetime] = {}

    def facts(self) -> Mapping[NodeId, InstanceFacts]:
        """Return the facts by instance. Instances about which EC2 has reported none are missing."""
        networks, image_ids, times = self._networks, self._image_ids, self._image_times
        return {
            node_id: InstanceFacts(
                failure_domain=networks[node_id][-1] if node_id in networks else None,
                image_id=image_ids.get(node_id),
                image_created_at=times.get(image_ids.get(node_id, "")),
            )
            for node_id in networks.keys() | image_ids.keys()
        }

    def read_images(self, instances: Mapping[NodeId, InstanceState]) -> None:
        """Store the image ids of EC2's newest answer about the fleet's instances."""
        self._image_ids = {node_id: instance.image_id for node_id, instance in instances.items() if instance.image_id}

    def ask(
        self,
        operator: CloudOperator,
        node_ids: Set[NodeId],
        *,
        is_due: bool,
        report: Callable[[str, CloudError], None],
    ) -> bool:
        """Request missing facts of instances and of their images.

        Args:
            operator: sends the requests to AWS.
            node_ids: the fleet's instances.
            is_due: False requests only facts of instances and images that were never requested.
            report: is called with the subject and the error of each failed request.

        Returns:
            Whether EC2 reported a new fact.
        """

        def missing(subject: str, known: Mapping[Id, Fact], ids: Set[Id], request: Request[Id, Fact]) -> dict[Id, Fact]:
            unknown = ids - known.keys()
            if not unknown or not (is_due or unknown - self._asked):
                return {}
            self._asked |= unknown
            try:
                return dict(request(sorted(unknown)))
            except CloudError as error:
                report(subject, error)
                return {}

        images = set(self._image_ids.values())
        networks = missing("network nodes of its instances", self._networks, node_ids, operator.network_nodes)
        times = missing("creation times of its images", self._image_times, images, operator.image_times)
        # Replace the mappings instead of updating them, because other threads may be reading them.
        self._networks = {**self._networks, **networks}
        self._image_times = {**self._image_times, **times}
        return bool(networks or times)

"""Tags instances with the job and the project for which they work, so that AWS's cost reports can divide their cost.

Invariant: the tags are derived from the nodes' rows and EC2's answer alone. An error heals with the next comparison.

Source: https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/custom-tags.html
"""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.cloud.operator import WORK_TAGS
from control_plane.db import jobs, nodes
from control_plane.loop.context import LoopContext
from everstep.protocol.ids import FleetName, NodeId


def update_tags(context: LoopContext, fleet: FleetName, current: Mapping[NodeId, Mapping[str, str]]) -> None:
    """Change the tags of the instances whose tags differ from their work. Blocks.

    `current` has the tags of each instance that has not ended. Raises CloudError if EC2 refused a change; others may
    have succeeded.
    """
    with context.database.read() as session:
        runs = {NodeId(node.id): node.run_id for node in nodes.of_fleet(session, fleet) if node.run_id is not None}
        owners = jobs.owners(session, set(runs.values()))
    changes: dict[tuple[str, ...], list[NodeId]] = {}
    for node_id, tags in current.items():
        owner = owners.get(runs.get(node_id, ""))
        wanted = () if owner is None else (owner.job_name, owner.project)
        if tuple(tags[key] for key in WORK_TAGS if key in tags) != wanted:
            changes.setdefault(wanted, []).append(node_id)
    for values, node_ids in changes.items():
        context.operator.set_work_tags(node_ids, dict(zip(WORK_TAGS, values, strict=bool(values))))

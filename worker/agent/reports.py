"""Builds the agent's reports: its first message, the node's state, and the node's part in the promised generation.

Invariant: every fact in a report is true when the report is sent.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import KW_ONLY, dataclass

import msgspec

from everstep import __version__
from everstep.protocol.agent_messages import AgentReport, Hello, MemberReport, NodeFault
from everstep.protocol.codec import PROTOCOL_MINOR
from everstep.protocol.limits import MAX_FAULTS, cut
from worker.agent.burn_in import BurnInRunner
from worker.agent.inspection import RankInspection
from worker.agent.lifecycle import Lifecycle
from worker.agent.own_log import Evidence
from worker.agent.prometheus import AgentFacts
from worker.agent.settings import AgentSettings
from worker.agent.sources import SourcePrefetch
from worker.agent.usage import Usage
from worker.core.metric_outbox import MetricOutbox
from worker.node.full_disks import FullDisks
from worker.node.instance_metadata import InstanceMetadata
from worker.provisioning.supplies import Supplies
from worker.ranks.server import RankServer
from worker.ranks.supervisor import Supervisor
from worker.replication.tcp import PeerListener


@dataclass(eq=False, repr=False)
class AgentReports:
    """Builds the agent's reports from the state of the agent's other parts. `metadata` is None outside of EC2."""

    settings: AgentSettings
    agent_id: str
    lifecycle: Lifecycle
    _: KW_ONLY
    listener: PeerListener
    ranks: RankServer
    supervisor: Supervisor
    supplies: Supplies
    sources: SourcePrefetch
    burn_in: BurnInRunner
    evidence: Evidence
    inspection: RankInspection
    usage: Usage
    full_disks: FullDisks
    outbox: MetricOutbox
    metadata: InstanceMetadata | None

    def __post_init__(self) -> None:
        self.exposure = self.settings.exposure
        """What a job's code can reach outside its job, such as the agent's files. Empty if nothing."""
        self._sequence = 0
        self._newest: AgentReport | None = None

    def hello(self) -> Hello:
        """Return the first message that the agent sends on a new connection to the control plane."""
        self.outbox.connected()
        return Hello(
            node_id=self.settings.node_id,
            agent_id=self.agent_id,
            address=self.settings.address,
            peer_port=self.listener.port,
            memory_bytes=self.settings.memory_bytes,
            version=__version__,
            run=self.lifecycle.promise.run,
            protocol_minor=PROTOCOL_MINOR,
            public_key=self.listener.identity.public_key if self.listener.identity is not None else None,
        )

    def report(self) -> AgentReport:
        """Return the newest state of this node. Called right before each send."""
        self._sequence += 1
        self._newest = AgentReport(
            node_id=self.settings.node_id,
            sequence=self._sequence,
            member=self._member(),
            metrics=self.outbox.due(time.monotonic()),
            refused_count=self.listener.refused_count + self.ranks.refused_count + self.supplies.refused_count,
            notices=self.metadata.notices if self.metadata is not None else (),
            evidence_key=self.evidence.key,
            is_warm=self.supervisor.is_warm,
            exposure=cut(self.exposure),
            sources=self.sources.settled,
            faults=self._node_faults(),
            memory=self.usage.memory(),
            burn_in=self.burn_in.result,
        )
        return self._newest

    def facts(self, *, is_connected: bool) -> AgentFacts:
        """Return the facts for the Prometheus endpoint, which calls this in another thread."""
        # Read only immutable state, because another thread calls this method.
        return AgentFacts(self._newest, is_connected, len(self.outbox), self.outbox.dropped_count)

    def _node_faults(self) -> tuple[NodeFault, ...]:
        of_devices = self.usage.faults()
        # With a promise, the member's report has the faults of the lifecycle.
        has_member = self.lifecycle.promise.value is not None and not self.lifecycle.is_unsettled
        of_lifecycle = () if has_member else self.lifecycle.faults
        return (*of_devices, *self.full_disks.faults(of_devices), *of_lifecycle)[:MAX_FAULTS]

    def _member(self) -> MemberReport | None:
        lifecycle, membership = self.lifecycle, self.lifecycle.promise.membership
        if membership is None or lifecycle.is_unsettled:
            return None
        if (member := lifecycle.member) is None:
            return MemberReport(
                job=membership.job,
                run=membership.run,
                generation=membership.generation,
                phase=membership.phase,
                inventory=lifecycle.remains.inventory,
                ended=lifecycle.remains.ended,
                commits=lifecycle.remains.commits,
                faults=lifecycle.reported_faults[:MAX_FAULTS],
            )
        exits = lifecycle.exits
        return MemberReport(
            job=membership.job,
            run=membership.run,
            generation=membership.generation,
            phase=membership.phase,
            ranks=tuple(
                msgspec.structs.replace(status, exit=exits.get(status.rank)) for status in member.status.rank_statuses()
            ),
            longest=member.status.longest(),
            stacks=self.inspection.stacks,
            protection=member.status.protection(),
            silent_peers=member.status.silent_peers(),
            round=member.status.round_status(),
            uploads=tuple(member.uploads.uploaded),
            running_uploads=member.uploads.running(),
            faults=(*lifecycle.reported_faults, *member.status.faults(asyncio.get_running_loop().time()))[:MAX_FAULTS],
            load_seconds=lifecycle.load_seconds,
            restored_from=member.base.restored_from,
            target=member.status.target(),
            measured=member.lines.measurements.newest,
            logged=member.lines.newest_values.report(),
        )

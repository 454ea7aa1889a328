"""Settings of an agent, constant for the life of the process."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from everstep.host.log_records import LogFormat
from everstep.protocol.ids import NodeId
from worker.agent.attestation import Claim
from worker.node.rank_user import RankUser
from worker.ranks.shim.cgroups import NO_LIMITS, JobLimits


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of an agent: its node, its addresses, its folders and its limits."""

    node_id: NodeId
    address: str
    state: Path
    sockets: Path
    """Folder for this node's sockets, with a short path. No other node uses the folder."""
    memory_bytes: int
    control_plane_urls: tuple[str, ...]
    """URLs of the control plane's servers, one of which serves this node's fleet."""
    join_token: str
    peer_port: int = 0
    is_warm: bool = True
    tls: ssl.SSLContext | None = None
    """None uses the system's certificates."""
    claim: Claim | None = None
    """None if the agent joins with a join token."""
    input_bytes: int | None = None
    """Disk space for jobs' inputs, including cached ones. None means the disk's size minus a reserve."""
    log_format: LogFormat = "text"
    metrics_address: tuple[str, int] | None = None
    """Address and port of the Prometheus endpoint; None for no endpoint."""
    rank_user: RankUser | None = None
    """Linux user, or range of users with one per job, that ranks run as; None means the agent's own user."""
    allows_builds: bool = False
    """True if pip may build packages for which no wheel exists. A build executes the package's code."""
    exposure: str = ""
    """What a job's code can reach outside its job, such as the agent's files. Empty if nothing."""
    metadata_endpoint: str | None = None
    """None if the service is disabled or the machine is not an EC2 instance."""
    ranks_slice: str = ""
    """The systemd slice in which ranks run. If empty, ranks run in the agent's own cgroup."""
    job_limits: JobLimits = NO_LIMITS
    """Limits for the ranks of one job on this node together, which their cgroup imposes."""

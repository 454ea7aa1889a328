"""Tables of the control plane's database as SQLAlchemy models, for SQLite and PostgreSQL.

No function of `control_plane.db` returns rows of these classes. A job names its fleet without a foreign key, because
jobs outlive fleets. A token may name a fleet that does not exist yet.

    fleet ─┬─ node ─┬─ notice             job ─┬─ generation
           │        └─ implication             ├─ shard ─ replica
           └─ fleet_hour                       ├─ checkpoint
                                               ├─ revision
    token   spent_nonce   quota                ├─ incident ─ note
    source   source_upload                     ├─ job_hour
    intent   event   audit_entry               ├─ note
    export   automation_pause                  ├─ drill
    schema_support   database_restore          ├─ metric_log, metric, metric_chunk
                                               └─ log_export
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar

import msgspec
from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from control_plane.core.observed.causes import NOTHING, Reason
from control_plane.core.observed.facts import Fact, Recorded
from control_plane.core.observed.incidents import Response
from control_plane.core.observed.nodes import BurnIn
from control_plane.core.verification import Blocked, CheckpointVerdict
from everstep.protocol.codec import resolve

NAME_LENGTH = 64
"""Longest names of jobs, fleets and projects. SageMaker's limit is 63."""


class UtcDateTime(TypeDecorator[datetime]):
    """A column type for datetimes in UTC.

    SQLite stores no zone, so this type removes it on write and restores it on read.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert a time to UTC: naive for SQLite, aware for other databases. Raises ValueError for a naive time."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a moment without a time zone does not go into the database")
        in_utc = value.astimezone(UTC)
        return in_utc.replace(tzinfo=None) if dialect.name == "sqlite" else in_utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Convert a stored time to an aware datetime in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class PlainText(TypeDecorator[str]):
    """A column type for text of any length.

    PostgreSQL cannot store NUL characters, so this type replaces them everywhere.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        """Replace NUL by U+FFFD, the replacement character."""
        return None if value is None else value.replace("\x00", "\ufffd")


class ValueText(TypeDecorator[Any]):
    """A column type for a value or values, such as reasons, stored as JSON text.

    `Recorded` stands for any other text: the sentence of an earlier version, or a value of a class that only a newer
    version has.
    """

    impl = Text
    cache_ok = True

    def __init__(self, kind: Any, *, is_several: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.is_several = is_several
        self._decoder = msgspec.json.Decoder[Any](tuple[kind, ...] if is_several else kind)

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:  # noqa: ARG002
        """Encode the value or the values."""
        return None if value is None else msgspec.json.encode(value).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:  # noqa: ARG002
        """Decode a column's text."""
        try:
            return None if value is None else self._decoder.decode(value)
        except msgspec.MsgspecError:
            unknown = Recorded(text=value or "")
            return (unknown,) if self.is_several else unknown


class StoredValue(TypeDecorator[Any]):
    """A column type for a value of a dataclass, or of another type that msgspec converts, stored as JSON."""

    impl = JSON(none_as_null=True)
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        super().__init__()
        resolve(kind)
        self.kind = kind
        self._convert = partial(msgspec.convert, type=kind)

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002
        """Convert the value to JSON's types."""
        return None if value is None else msgspec.to_builtins(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002
        """Convert a column's JSON value."""
        return None if value is None else self._convert(value)


_BigId = BigInteger().with_variant(Integer, "sqlite")
"""SQLite generates ids only for columns of type INTEGER."""


class Base(DeclarativeBase):
    """Base class of all tables. It names constraints, so that migrations can refer to them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: UtcDateTime,
        str: PlainText,
        int: BigInteger,
        float: Float,
        bytes: LargeBinary,
        **{
            kind: StoredValue(kind)
            for kind in (tuple[str, ...], tuple[tuple[str, int], ...], tuple[tuple[float, int], ...])
        },
        dict[str, str]: JSON,
        dict[str, int]: JSON,
        dict[str, Any]: JSON,
        list[dict[str, Any]]: JSON,
    }


class FleetRow(Base):
    """A registered Auto Scaling group."""

    __tablename__ = "fleet"

    name: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    auto_scaling_group_name: Mapped[str] = mapped_column(unique=True)
    project: Mapped[str] = mapped_column(String(NAME_LENGTH))
    state: Mapped[str] = mapped_column(String(NAME_LENGTH))
    delete_requested_at: Mapped[datetime | None]
    min_node_count: Mapped[int]
    spare_count: Mapped[int]
    spare_probability: Mapped[float | None]
    """Required probability that a spare is free when a node fails. If set, `spare_count` does not apply."""
    hold_failed_instances: Mapped[bool] = mapped_column(default=False)
    max_replacements_per_hour: Mapped[int]
    node_role_name: Mapped[str] = mapped_column(default="")
    """IAM role of the group's instances. If empty, agents can join only with join tokens."""
    allow_drills: Mapped[bool] = mapped_column(default=False)
    allow_commands: Mapped[bool] = mapped_column(default=False)
    replica_encryption: Mapped[str] = mapped_column(default="Auto", server_default="Auto")
    """A `core.encryption.ReplicaEncryption`."""
    encrypting_types: Mapped[tuple[str, ...]] = mapped_column(default=(), server_default="[]")
    """Instance types that encrypt traffic between instances, as EC2 described them last."""
    blindness_lifted_at: Mapped[datetime | None]
    """Time at which a user stated that the silent nodes are lost (UnfreezeFleet). Cleared when most agents report
    again.
    """
    max_node_count: Mapped[int]
    """MaxSize of the group at the last poll of AWS."""
    instance_type: Mapped[str] = mapped_column(default="")
    availability_zone: Mapped[str] = mapped_column(default="")
    price_usd_per_hour: Mapped[float | None]
    desired_node_count: Mapped[int] = mapped_column(default=0)
    vacancies: Mapped[tuple[tuple[float, int], ...]] = mapped_column(default=())
    """Instances that the group lacks, as pairs: Unix time since which it lacks them, and their number."""
    drift: Mapped[tuple[str, ...]] = mapped_column(default=())
    reasons: Mapped[tuple[Reason, ...]] = mapped_column(ValueText(Reason, is_several=True), default=())
    tags: Mapped[dict[str, str]] = mapped_column(default=dict)
    created_at: Mapped[datetime]
    idle_microseconds: Mapped[dict[str, int]] = mapped_column(default=dict)
    """Time of nodes without a job until `idle_until`, by `NodeState`, summed over nodes."""
    idle_counts: Mapped[dict[str, int]] = mapped_column(default=dict)
    """Nodes without a job at `idle_until`, by `NodeState`."""
    idle_until: Mapped[datetime | None]
    roll: Mapped[dict[str, Any] | None]
    """The newest `FleetRoll`, which may have ended."""
    roll_progress: Mapped[dict[str, Any] | None]
    """The `RollProgress` stored last. Directly after the start of a roll, it belongs to the previous roll."""
    lease_owner: Mapped[str | None]
    lease_counter: Mapped[int] = mapped_column(default=0)


class DutyRow(Base):
    """The duty that the newest event has reported. Without a row, the job or fleet needs no person."""

    __tablename__ = "duty"

    subject: Mapped[str] = mapped_column(String(128), primary_key=True)
    """`job/` and the run id, or `fleet/` and the name."""
    kind: Mapped[str] = mapped_column(String(NAME_LENGTH))
    urgency: Mapped[str] = mapped_column(String(NAME_LENGTH))


class FleetHourRow(Base):
    """`FleetRow.idle_microseconds` as of a full hour."""

    __tablename__ = "fleet_hour"

    fleet_name: Mapped[str] = mapped_column(ForeignKey("fleet.name", ondelete="CASCADE"), primary_key=True)
    hour: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Hours since 1970-01-01 00:00 UTC."""
    idle_microseconds: Mapped[dict[str, int]]


class NodeRow(Base):
    """One EC2 instance of a fleet."""

    __tablename__ = "node"

    id: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    fleet_name: Mapped[str] = mapped_column(String(NAME_LENGTH), index=True)
    state: Mapped[str] = mapped_column(String(NAME_LENGTH))
    run_id: Mapped[str | None] = mapped_column(String(NAME_LENGTH), index=True)
    """None for a spare and for a node that no job may use."""
    address: Mapped[str] = mapped_column(default="")
    peer_port: Mapped[int] = mapped_column(default=0)
    memory_bytes: Mapped[int] = mapped_column(default=0)
    agent_id: Mapped[str] = mapped_column(default="")
    version: Mapped[str] = mapped_column(default="")
    instance_type: Mapped[str] = mapped_column(default="")
    availability_zone: Mapped[str] = mapped_column(default="")
    failure_domain: Mapped[str | None]
    """Innermost EC2 network node above the instance. None until AWS has reported this network node."""
    image_id: Mapped[str | None]
    image_created_at: Mapped[datetime | None]
    """When the image was created. None until AWS has reported it, also for an image that the account may not use."""
    reason: Mapped[Reason] = mapped_column(ValueText(Reason), default=NOTHING)
    hold: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    """A `core.observed.fleets.Hold`, or None."""
    release: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    """A user's request to return or terminate a held node. Empty without a request."""
    request: Mapped[Reason | None] = mapped_column(ValueText(Reason))
    """A user's or a roll's request (`Requested`)."""
    since: Mapped[datetime | None]
    """Entry into the state."""
    replaced_at: Mapped[datetime | None]
    """When Everstep last decided to replace the node."""
    returned_at: Mapped[datetime | None]
    """When a user last returned the node to service. Older entries of its fault history do not count."""
    evidence_at: Mapped[datetime | None]
    """When the logs of a node that is held for inspection were completely in S3."""
    burn_in: Mapped[BurnIn | None] = mapped_column(StoredValue(BurnIn))
    """None before the first order to test the node."""
    created_at: Mapped[datetime]
    wanted_at: Mapped[datetime | None]
    """When the control plane noticed that the group lacked the instance that became this node, if it did."""
    connected_at: Mapped[datetime | None]
    joined_at: Mapped[datetime | None]
    """Time at which the agent first reported with a session token. None before, and after a reset of the session."""
    arrival_seconds: Mapped[float | None]
    ended_at: Mapped[datetime | None]


class NoticeRow(Base):
    """An announcement by AWS about an instance. Repeated deliveries of an event share one row."""

    __tablename__ = "notice"

    node_id: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    kind: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    event_id: Mapped[str] = mapped_column(primary_key=True)
    source: Mapped[str] = mapped_column(String(NAME_LENGTH))
    message: Mapped[str]
    ends_at: Mapped[datetime | None]
    recorded_at: Mapped[datetime]


class ImplicationRow(Base):
    """An incident that involved a node. The row outlives the job and the node."""

    __tablename__ = "implication"

    node_id: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    incident_id: Mapped[str] = mapped_column(String(NAME_LENGTH + 32), primary_key=True)
    """Id of the job's incident, or `fleet-<fleet>-<Unix seconds>` if the node had no job."""
    fleet_name: Mapped[str] = mapped_column(String(NAME_LENGTH), index=True)
    at: Mapped[datetime]
    what: Mapped[str] = mapped_column(String(NAME_LENGTH))
    evidence: Mapped[Fact] = mapped_column(ValueText(Fact))
    is_own_word: Mapped[bool]
    remedy: Mapped[str] = mapped_column(String(NAME_LENGTH))


class JobRow(Base):
    """A submitted training job and its progress."""

    __tablename__ = "job"

    run_id: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    """Unique within the project."""
    fleet_name: Mapped[str] = mapped_column(String(NAME_LENGTH), index=True)
    project: Mapped[str] = mapped_column(String(NAME_LENGTH))
    priority: Mapped[int] = mapped_column(default=0)
    tags: Mapped[dict[str, str]] = mapped_column(default=dict)
    request_digest: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    """SHA-256 of the project and the whole request. A later request with the same token and another digest is a
    conflict.
    """
    request_token: Mapped[str | None] = mapped_column(String(NAME_LENGTH), unique=True)
    """SHA-256 of the project and the request's ClientRequestToken. None without a token."""
    spec: Mapped[dict[str, Any]]
    """`jobs.SavedJobSpec` of the newest revision."""
    revision: Mapped[int] = mapped_column(default=1)
    """The newest revision. The running generation may use an earlier one (`GenerationRow.revision`)."""
    state: Mapped[str] = mapped_column(String(NAME_LENGTH), index=True)
    reason: Mapped[str]
    transitions: Mapped[list[dict[str, Any]]] = mapped_column(default=list)
    stop_requested_at: Mapped[datetime | None]
    pause_requested_at: Mapped[datetime | None]
    """None if no user has paused the job since the last resumption."""
    checkpoint_wanted_step: Mapped[int] = mapped_column(default=-1)
    """Step of the newest CreateCheckpoint. A checkpoint of this or a later step fulfils it. -1 without a request."""
    checkpoint_wanted_at: Mapped[datetime | None]
    rehearsal_requested_at: Mapped[datetime | None]
    """Last RehearseTrainingJob."""
    taken_over_at: Mapped[datetime | None]
    """TakeOverTrainingJob. None if Everstep controls the job."""
    taken_over_by: Mapped[str] = mapped_column(default="")
    accepted_step: Mapped[int] = mapped_column(default=-1, server_default="-1")
    """Oldest step from which a person lets the job continue (AcceptLoss). -1 without a consent."""
    accepted_after: Mapped[int] = mapped_column(default=0, server_default="0")
    """Generation after whose end the consent is valid."""
    created_at: Mapped[datetime]
    modified_at: Mapped[datetime]
    """Last change of state, settings or users' requests."""
    started_at: Mapped[datetime | None]
    """First start of the ranks."""
    ended_at: Mapped[datetime | None]
    purge_at: Mapped[datetime | None]
    """Time at which a job in the trash is deleted for good, with its objects. None outside of the trash."""
    generation: Mapped[int] = mapped_column(default=0)
    """Newest generation with a plan. 0 before the first."""
    issued_generation: Mapped[int] = mapped_column(default=0)
    """Highest number that an agent may have received. A new generation needs a higher one."""
    base_step: Mapped[int] = mapped_column(default=0)
    committed_step: Mapped[int] = mapped_column(default=-1)
    proposed_step: Mapped[int] = mapped_column(default=-1)
    boundary: Mapped[int] = mapped_column(default=-1)
    max_boundary: Mapped[int] = mapped_column(default=-1)
    """Highest boundary of any generation."""
    target_step: Mapped[int] = mapped_column(default=-1)
    """Finished steps at which the script ends, as its ranks reported last. -1 before the first report."""
    committed_at: Mapped[datetime | None]
    failures: Mapped[list[dict[str, Any]]] = mapped_column(default=list)
    """Recent failures, from which `core.breakers` decides on a retry."""
    accounting: Mapped[dict[str, int]] = mapped_column(default=dict)
    """Microseconds until `accounted_until`, by `core.observed.spans.Bucket`."""
    accounted_until: Mapped[datetime | None]
    node_microseconds: Mapped[int] = mapped_column(default=0)
    cost_usd: Mapped[float | None]
    memo: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """`core.observed.jobs.Memo`."""
    lease_owner: Mapped[str | None]
    lease_counter: Mapped[int] = mapped_column(default=0)

    __table_args__ = (
        UniqueConstraint("project", "name"),
        Index(None, "fleet_name", "state"),
        # These indexes serve the sort orders of `job_lists`, alone and combined with the most frequent filters.
        Index(None, "created_at", "run_id"),
        Index(None, "modified_at", "run_id"),
        Index(None, "name", "run_id"),
        Index(None, "project", "created_at", "run_id"),
        Index(None, "project", "modified_at", "run_id"),
        Index(None, "project", "name", "run_id"),
        Index(None, "fleet_name", "created_at", "run_id"),
        Index(None, "state", "created_at", "run_id"),
        Index(None, "ended_at", "created_at", "run_id"),
    )


class JobHourRow(Base):
    """`JobRow.accounting` as of a full hour."""

    __tablename__ = "job_hour"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    hour: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Hours since 1970-01-01 00:00 UTC."""
    accounting: Mapped[dict[str, int]]
    node_microseconds: Mapped[int]


class JobSpanRow(Base):
    """A settled period of a job in one accounting bucket. The job's row contains the newest periods."""

    __tablename__ = "job_span"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    start: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Unix time in microseconds."""
    end: Mapped[int]
    bucket: Mapped[str]
    missing: Mapped[int]
    """Nodes that the job lacked for NodeCount."""


class QuotaRow(Base):
    """Limits of a project, and the AWS resources that its submitters may use."""

    __tablename__ = "quota"

    project: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    max_node_count: Mapped[int | None]
    """Limit per fleet, for all jobs of the project. None means no limit."""
    max_job_count: Mapped[int | None]
    """Limit of unfinished jobs in all fleets. None means no limit."""
    max_source_bytes: Mapped[int | None]
    """Limit of the bytes of all source archives, including uploads in progress. None means no limit."""
    max_priority: Mapped[int] = mapped_column(default=0)
    allowed_role_arns: Mapped[tuple[str, ...]] = mapped_column(default=())
    """A trailing `*` matches any suffix."""
    allowed_secrets: Mapped[tuple[str, ...]] = mapped_column(default=())
    allowed_data: Mapped[tuple[str, ...]] = mapped_column(default=())


class GenerationRow(Base):
    """A generation with its plan, which never changes, until retention deletes it."""

    __tablename__ = "generation"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    revision: Mapped[int] = mapped_column(default=1)
    """Revision of the job from which the generation was planned."""
    parent: Mapped[int]
    base_step: Mapped[int]
    world_size: Mapped[int]
    """Ranks of the plan."""
    plan: Mapped[bytes]
    """`GenerationPlan` from `everstep.protocol.codec.encode`. Empty once retention has deleted it."""
    node_ids: Mapped[tuple[str, ...]] = mapped_column(default=())
    """Node ids in the order of GROUP_RANK, so that lists of nodes need not decode the plan."""
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]


class RevisionRow(Base):
    """A change of a job after its creation, which is revision 1 and has no row."""

    __tablename__ = "revision"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[datetime]
    changes: Mapped[list[dict[str, Any]]]
    """Each a `revisions.Change` as JSON."""


class ShardRow(Base):
    """One rank's shard, as its owner's agent reported it last."""

    __tablename__ = "shard"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    generation: Mapped[int]
    owner_node_id: Mapped[str] = mapped_column(String(NAME_LENGTH))
    committed_step: Mapped[int]
    payload_bytes: Mapped[int]
    reason: Mapped[str]
    verified: Mapped[list[dict[str, Any]]] = mapped_column(default=list)
    """For each holder: its node id, the newest step that it has verified, and the time of the verification."""
    updated_at: Mapped[datetime]


class ReplicaRow(Base):
    """One holder of a shard. The control plane writes the row only when the holder's membership or view changes."""

    __tablename__ = "replica"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    holder_node_id: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    position: Mapped[int]
    """Position in the order of the shard's holders. 0 is the owner's own node."""
    is_in_view: Mapped[bool]
    changed_at: Mapped[datetime]

    __table_args__ = (ForeignKeyConstraint(["run_id", "rank"], ["shard.run_id", "shard.rank"], ondelete="CASCADE"),)


class CheckpointRow(Base):
    """A set of shards in S3."""

    __tablename__ = "checkpoint"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    generation: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[str] = mapped_column(String(NAME_LENGTH))
    bucket: Mapped[str]
    manifest_key: Mapped[str] = mapped_column(String(1024))
    manifest: Mapped[bytes | None]
    """Copy of the manifest in S3, with which a recovery can be planned without S3."""
    object_bytes: Mapped[int]
    created_at: Mapped[datetime]
    completed_at: Mapped[datetime | None]
    pinned_at: Mapped[datetime | None]
    """None if not pinned. The job's limits never delete a pinned checkpoint."""
    verify_requested_at: Mapped[datetime | None] = mapped_column(index=True)
    """None without an open request."""
    verified_at: Mapped[datetime | None]
    """End of the last verification."""
    verify_after: Mapped[datetime | None]
    """Time at which the next attempt is due. None: immediately."""
    blocked: Mapped[Blocked | None] = mapped_column(StoredValue(Blocked))
    """Why the requested verification could not read S3. None without a failed attempt."""
    verdict: Mapped[CheckpointVerdict | None] = mapped_column(StoredValue(CheckpointVerdict))
    """None if there was no verification."""
    trashed_at: Mapped[datetime | None]
    """None outside of the trash."""
    purge_at: Mapped[datetime | None]
    """Earliest deletion of a trashed checkpoint for good."""
    trash_cause: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    """A `core.checkpoints.TrashCause`. None outside of the trash."""


class IncidentRow(Base):
    """A failure and its recovery."""

    __tablename__ = "incident"

    id: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), index=True)
    job_name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    project: Mapped[str] = mapped_column(String(NAME_LENGTH))
    phase: Mapped[str] = mapped_column(String(NAME_LENGTH))
    cause: Mapped[str] = mapped_column(String(NAME_LENGTH))
    evidence: Mapped[tuple[Fact, ...]] = mapped_column(StoredValue(tuple[Fact, ...]), default=())
    decision: Mapped[Response] = mapped_column(ValueText(Response))
    restore_source: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    from_step: Mapped[int | None]
    reached_step: Mapped[int | None]
    """Newest step that training had finished before the failure."""
    lost_steps: Mapped[int | None]
    generation_before: Mapped[int]
    generation_after: Mapped[int | None]
    instance_ids: Mapped[tuple[str, ...]] = mapped_column(default=())
    faulted_instance_ids: Mapped[tuple[str, ...]] = mapped_column(default=())
    """Instances with the fault, whether or not the job lost them."""
    lost_node_count: Mapped[int] = mapped_column(default=0)
    """Lost nodes that failed or that AWS reclaimed."""
    node_count_before: Mapped[int] = mapped_column(default=0)
    """Nodes of the generation that ended. 0 until the next generation has a plan."""
    node_count_after: Mapped[int] = mapped_column(default=0)
    replacement_instance_ids: Mapped[tuple[str, ...]] = mapped_column(default=())
    failed_at: Mapped[datetime]
    opened_at: Mapped[datetime]
    replaced_at: Mapped[datetime | None]
    restored_at: Mapped[datetime | None]
    closed_at: Mapped[datetime | None]
    is_given_up: Mapped[bool] = mapped_column(default=False, server_default=false())
    """Whether the job ended or was paused before training had caught up."""
    detect_seconds: Mapped[float | None]
    replace_seconds: Mapped[float | None]
    restore_seconds: Mapped[float | None]
    rework_seconds: Mapped[float | None]
    cost_usd: Mapped[float | None]
    rank_sources: Mapped[tuple[tuple[str, int], ...]] = mapped_column(default=())
    """Restore source of each rank's shard, run-length encoded: `[["local", 2], ["peer", 1]]`."""
    acknowledged_at: Mapped[datetime | None]
    acknowledged_by: Mapped[str] = mapped_column(default="")
    acknowledgement: Mapped[str] = mapped_column(default="")
    owner: Mapped[str] = mapped_column(default="")
    """Name as a user entered it. Empty without an owner."""
    detail: Mapped[dict[str, Any]] = mapped_column(default=dict)

    __table_args__ = (Index(None, "opened_at", "id"),)  # This index serves the sort order of lists of incidents.


class NoteRow(Base):
    """A user's note about a job or one of its incidents."""

    __tablename__ = "note"

    id: Mapped[int] = mapped_column(_BigId, primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), index=True)
    incident_id: Mapped[str | None] = mapped_column(ForeignKey("incident.id", ondelete="CASCADE"))
    """None for a note about the job itself."""
    at: Mapped[datetime]
    author: Mapped[str]
    text: Mapped[str]
    request_token: Mapped[str | None] = mapped_column(String(NAME_LENGTH), unique=True)
    """SHA-256 of job, incident, author's token and ClientRequestToken. None without a token."""


class DrillRow(Base):
    """A fault that a user injects into a job deliberately."""

    __tablename__ = "drill"

    id: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), index=True)
    job_name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    fleet_name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    project: Mapped[str] = mapped_column(String(NAME_LENGTH))
    kind: Mapped[str] = mapped_column(String(NAME_LENGTH))
    node_id: Mapped[str] = mapped_column(String(NAME_LENGTH))
    rank: Mapped[int | None]
    requested_by: Mapped[str]
    requested_at: Mapped[datetime]
    state: Mapped[str] = mapped_column(String(NAME_LENGTH))
    generation: Mapped[int] = mapped_column(default=0)
    struck_at: Mapped[datetime | None]
    incident_id: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    ended_at: Mapped[datetime | None]
    outcome: Mapped[str] = mapped_column(default="")


class MetricLogRow(Base):
    """The position up to which the database has stored the metrics that a run logs."""

    __tablename__ = "metric_log"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    generation: Mapped[int]
    """Newest generation with a value."""
    agent_id: Mapped[str]
    next_number: Mapped[int]
    """Next number of the agent. Values with smaller numbers are stored already, or are lost."""
    dropped_count: Mapped[int]


class MetricRow(Base):
    """A metric name of a run, with its newest value."""

    __tablename__ = "metric"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    fine_from_step: Mapped[int]
    """Late values of earlier steps are dropped, because their points are already joined."""
    last_step: Mapped[int]
    last_at: Mapped[datetime]
    last_value: Mapped[str] = mapped_column(String(NAME_LENGTH))
    """Text in Python's float format, because SQLite would store NaN as NULL."""


class MetricChunkRow(Base):
    """Consecutive points of one metric, encoded by `metrics.pack`. `width` is the number of steps per point."""

    __tablename__ = "metric_chunk"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    width: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    points: Mapped[bytes]
    nodes: Mapped[tuple[str, ...]] = mapped_column(default=())
    """Nodes of each point's minimum, then of each point's maximum. Empty for a metric that a script logs."""
    breakdowns: Mapped[bytes | None]
    """Values by node or rank (`core.breakdowns`). None before schema 0006, and for fewer than 2 or more than 64 of
    them.
    """


class EventRow(Base):
    """An event, which never changes.

    No id is used twice, even after retention, because clients continue after an id.
    """

    __tablename__ = "event"
    __table_args__ = (Index("ix_event_project_id", "project", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(_BigId, primary_key=True, autoincrement=True)
    at: Mapped[datetime]
    type: Mapped[str] = mapped_column(String(NAME_LENGTH))
    message: Mapped[str]
    project: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    fleet_name: Mapped[str | None] = mapped_column(String(NAME_LENGTH), index=True)
    job_name: Mapped[str | None] = mapped_column(String(NAME_LENGTH), index=True)
    node_id: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    detail: Mapped[dict[str, Any]] = mapped_column(default=dict)


class AuditEntryRow(Base):
    """One call of the API that may change something."""

    __tablename__ = "audit_entry"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(_BigId, primary_key=True, autoincrement=True)
    at: Mapped[datetime]
    operation: Mapped[str] = mapped_column(String(NAME_LENGTH))
    resource: Mapped[str]
    project: Mapped[str] = mapped_column(String(NAME_LENGTH))
    token_id: Mapped[str] = mapped_column(String(NAME_LENGTH), index=True)
    caller: Mapped[str]
    """Description of the caller's token at that time."""
    role: Mapped[str] = mapped_column(String(NAME_LENGTH))
    source_address: Mapped[str] = mapped_column(String(NAME_LENGTH))
    request_id: Mapped[str] = mapped_column(String(NAME_LENGTH))
    status_code: Mapped[int | None]
    """None before the end of the call."""
    error_code: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")


class AutomationPauseRow(Base):
    """The pause of all automatic actions."""

    __tablename__ = "automation_pause"

    scope: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    """Always `all`, so that the table can have only one row."""
    paused_at: Mapped[datetime]
    paused_by: Mapped[str]
    """Name of the administrator's token."""
    reason: Mapped[str]


class DatabaseRestoreRow(Base):
    """A restore of this database from a backup. Nothing in S3 is deleted until a person has accepted it."""

    __tablename__ = "database_restore"

    restored_at: Mapped[datetime] = mapped_column(primary_key=True)
    first_generation: Mapped[int]
    """Generations that start after the restore have higher numbers."""
    differences: Mapped[list[dict[str, Any]]]
    """What S3 has and the backup lacked, or the reverse (`core.database_restore.Difference`)."""
    accepted_at: Mapped[datetime | None]
    """Time of `everstep db restored --accept`."""


class ExportRow(Base):
    """The progress of the export to one EventBridge bus."""

    __tablename__ = "export"

    name: Mapped[str] = mapped_column(String(512), primary_key=True)
    position: Mapped[int]
    """Last event that the receiver accepted."""
    failing_since: Mapped[datetime | None]
    failure: Mapped[str]
    lease_owner: Mapped[str | None]
    lease_counter: Mapped[int] = mapped_column(default=0)


class LogExportRow(Base):
    """A row of earlier servers, which copied logs to CloudWatch and may still run beside this one."""

    __tablename__ = "log_export"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    cursor: Mapped[str]
    is_over: Mapped[bool]


class IntentRow(Base):
    """A call to AWS or S3 with a side effect, recorded before its first attempt."""

    __tablename__ = "intent"

    key: Mapped[str] = mapped_column(primary_key=True)
    """Idempotency key. Equal calls have equal keys."""
    subject: Mapped[str] = mapped_column(index=True)
    """`job/<run id>` or `fleet/<name>`."""
    lease_owner: Mapped[str]
    lease_counter: Mapped[int]
    action: Mapped[str] = mapped_column(String(NAME_LENGTH))
    detail: Mapped[dict[str, Any]] = mapped_column(default=dict)
    state: Mapped[str] = mapped_column(String(NAME_LENGTH))
    outcome: Mapped[str] = mapped_column(default="")
    attempt_count: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]


class TokenRow(Base):
    """A bearer token."""

    __tablename__ = "token"

    id: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    """SHA-256 of the token, hexadecimal. Tokens have 256 random bits, so a slow hash would add no protection."""
    kind: Mapped[str] = mapped_column(String(NAME_LENGTH))
    role: Mapped[str] = mapped_column(String(NAME_LENGTH))
    project: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    fleet_name: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    node_id: Mapped[str | None] = mapped_column(String(NAME_LENGTH), index=True)
    description: Mapped[str] = mapped_column(default="")
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class SpentNonceRow(Base):
    """An id that must not be accepted again: a used nonce of an agent, or a signed-out browser session."""

    __tablename__ = "spent_nonce"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    ends_at: Mapped[datetime]


class SourceRow(Base):
    """A user's source archive, verified and stored."""

    __tablename__ = "source"

    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    project: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    """Project that uploaded the archive. Another project must upload it as well; the digest alone is not enough."""
    bucket: Mapped[str]
    key: Mapped[str] = mapped_column(String(1024))
    archive_bytes: Mapped[int]
    unpacked_bytes: Mapped[int]
    files: Mapped[tuple[str, ...]]
    created_at: Mapped[datetime]


class SourceUploadRow(Base):
    """Reserved space in a project's quota until a source is stored or its upload expires."""

    __tablename__ = "source_upload"

    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    project: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    archive_bytes: Mapped[int]
    expires_at: Mapped[datetime]


class SchemaSupportRow(Base):
    """An older version of the server that can run on the current schema, written by the version that migrates it."""

    __tablename__ = "schema_support"

    revision: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    """The schema that the row describes. Servers ignore rows about another schema."""
    server_revision: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    """Newest schema revision in the older version's code."""

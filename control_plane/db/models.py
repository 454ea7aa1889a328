"""Tables of the control plane, as SQLAlchemy sees them.

Invariant: a row of this module never leaves `control_plane.db`; the nouns' modules turn rows into frozen dataclasses.
Nothing here is known to one database only: SQLite and PostgreSQL create the same tables from it.

    fleet ─ node ─┬─ notice          job ─┬─ generation
                  └─ implication          ├─ shard ─ replica
    token                                 ├─ checkpoint
    source   intent   event   export   spent_nonce ├─ revision
                              quota       ├─ incident
                                          ├─ drill
                                          ├─ metric_log, metric, metric_chunk
                                          └─ log_export

A job's fleet is a name, not a foreign key: jobs are history and outlive the fleet that they ran on. A token may name a
fleet that is yet to be made.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar, TypeAlias

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
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

NAME_LENGTH = 64
"""Names of jobs, fleets and projects; SageMaker's limit is 63."""


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC. SQLite keeps no time zone, so the zone is dropped on the way in and put back on the way out."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Give SQLite a naive moment in UTC, other databases an aware one; refuse a moment without a time zone."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a moment without a time zone does not go into the database")
        in_utc = value.astimezone(UTC)
        return in_utc.replace(tzinfo=None) if dialect.name == "sqlite" else in_utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Give an aware moment in UTC, whatever the database gave."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class PlainText(TypeDecorator[str]):
    """Text of any length, what ranks print included.

    PostgreSQL keeps every character but NUL, so that no database is given one.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        """Put the replacement character in NUL's place."""
        return None if value is None else value.replace("\x00", "\ufffd")


class StringTuple(TypeDecorator[tuple[str, ...]]):
    """An ordered list of strings, immutable as soon as it is read."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> list[str] | None:  # noqa: ARG002
        """Give JSON a list."""
        return None if value is None else list(value)

    def process_result_value(self, value: list[str] | None, dialect: Dialect) -> tuple[str, ...] | None:  # noqa: ARG002
        """Give a tuple, which nobody can change behind the session's back."""
        return None if value is None else tuple(value)


_Runs: TypeAlias = tuple[tuple[str | float, int], ...]


class RunLengths(TypeDecorator[_Runs]):
    """Words or figures with how often each follows itself, immutable as soon as they are read."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: _Runs | None, dialect: Dialect) -> list[list[str | float]] | None:  # noqa: ARG002
        """Give JSON lists."""
        return None if value is None else [list(run) for run in value]

    def process_result_value(self, value: list[tuple[str | float, int]] | None, dialect: Dialect) -> _Runs | None:  # noqa: ARG002
        """Give tuples."""
        return None if value is None else tuple((each, count) for each, count in value)


_BigId = BigInteger().with_variant(Integer, "sqlite")
"""SQLite numbers rows by itself only where the column is an INTEGER."""


class Base(DeclarativeBase):
    """All tables, with names for constraints so that migrations can speak of them."""

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
        tuple[str, ...]: StringTuple,
        tuple[tuple[str, int], ...]: RunLengths,
        tuple[tuple[float, int], ...]: RunLengths,
        dict[str, str]: JSON,
        dict[str, int]: JSON,
        dict[str, Any]: JSON,
        list[dict[str, Any]]: JSON,
    }


class Fleet(Base):
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
    """Set: spares are counted by it instead."""
    hold_failed_instances: Mapped[bool] = mapped_column(default=False)
    max_replacements_per_hour: Mapped[int]
    node_role_name: Mapped[str] = mapped_column(default="")
    """IAM role that instances of the group run with; empty: their agents join with join tokens alone."""
    allow_drills: Mapped[bool] = mapped_column(default=False)
    allow_commands: Mapped[bool] = mapped_column(default=False)
    blindness_lifted_at: Mapped[datetime | None]
    """A person has said that who is silent is gone; the fleet loop takes it back when sight returns."""
    max_node_count: Mapped[int]
    """The group's MaxSize, as last seen."""
    instance_type: Mapped[str] = mapped_column(default="")
    availability_zone: Mapped[str] = mapped_column(default="")
    price_usd_per_hour: Mapped[float | None]
    desired_node_count: Mapped[int] = mapped_column(default=0)
    vacancies: Mapped[tuple[tuple[float, int], ...]] = mapped_column(default=())
    """Empty places of the group, by since when (Unix seconds)."""
    drift: Mapped[tuple[str, ...]] = mapped_column(default=())
    reason: Mapped[str] = mapped_column(default="")
    tags: Mapped[dict[str, str]] = mapped_column(default=dict)
    created_at: Mapped[datetime]
    lease_owner: Mapped[str | None]
    lease_counter: Mapped[int] = mapped_column(default=0)


class Node(Base):
    """One EC2 instance of a fleet and what the fleet loop uses it for."""

    __tablename__ = "node"

    id: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    fleet_name: Mapped[str] = mapped_column(String(NAME_LENGTH), index=True)
    state: Mapped[str] = mapped_column(String(NAME_LENGTH))
    run_id: Mapped[str | None] = mapped_column(String(NAME_LENGTH), index=True)
    """The run that the node belongs to; none: a spare, or not usable."""
    address: Mapped[str] = mapped_column(default="")
    peer_port: Mapped[int] = mapped_column(default=0)
    memory_bytes: Mapped[int] = mapped_column(default=0)
    agent_id: Mapped[str] = mapped_column(default="")
    version: Mapped[str] = mapped_column(default="")
    instance_type: Mapped[str] = mapped_column(default="")
    availability_zone: Mapped[str] = mapped_column(default="")
    failure_domain: Mapped[str | None]
    """The network node that its instance hangs on; none while AWS has not told."""
    reason: Mapped[str] = mapped_column(default="")
    hold: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    """Why it is held."""
    release: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    """What a person wants of a held node; empty: nothing."""
    request: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    """What a person wants done with it; empty: nothing."""
    request_words: Mapped[str] = mapped_column(default="")
    since: Mapped[datetime | None]
    """When it came into its state."""
    replaced_at: Mapped[datetime | None]
    """When another one was last asked for in its place."""
    returned_at: Mapped[datetime | None]
    """When a person last returned it to service: its history counts from there."""
    evidence_at: Mapped[datetime | None]
    """When all that is to be kept of a held one was in S3."""
    created_at: Mapped[datetime]
    wanted_at: Mapped[datetime | None]
    """Since when its group had a place for it; none where nobody saw that."""
    connected_at: Mapped[datetime | None]
    joined_at: Mapped[datetime | None]
    """When its agent first reported with a session of its own; none: not yet, or an administrator reset the session."""
    arrival_seconds: Mapped[float | None]
    ended_at: Mapped[datetime | None]


class Notice(Base):
    """What AWS has announced for an instance; an event is one row however often it comes."""

    __tablename__ = "notice"

    node_id: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    kind: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    event_id: Mapped[str] = mapped_column(primary_key=True)
    source: Mapped[str] = mapped_column(String(NAME_LENGTH))
    message: Mapped[str]
    ends_at: Mapped[datetime | None]
    recorded_at: Mapped[datetime]


class Implication(Base):
    """A node had its part in an incident: a line of the node's history, which outlives the job and the node."""

    __tablename__ = "implication"

    node_id: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    incident_id: Mapped[str] = mapped_column(String(NAME_LENGTH + 32), primary_key=True)
    """Of a job's incident; `fleet-<fleet>-<Unix seconds>` where no job had the node."""
    fleet_name: Mapped[str] = mapped_column(String(NAME_LENGTH), index=True)
    at: Mapped[datetime]
    what: Mapped[str] = mapped_column(String(NAME_LENGTH))
    evidence: Mapped[str]
    is_own_word: Mapped[bool]
    remedy: Mapped[str] = mapped_column(String(NAME_LENGTH))


class Job(Base):
    """What the user submitted, and how far it has come."""

    __tablename__ = "job"

    run_id: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    name: Mapped[str] = mapped_column(String(NAME_LENGTH), unique=True)
    fleet_name: Mapped[str] = mapped_column(String(NAME_LENGTH), index=True)
    project: Mapped[str] = mapped_column(String(NAME_LENGTH))
    priority: Mapped[int] = mapped_column(default=0)
    tags: Mapped[dict[str, str]] = mapped_column(default=dict)
    request_digest: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    """Of the request that made it and its ClientRequestToken, so that the same request again is known for what it is."""
    request_token: Mapped[str | None] = mapped_column(String(NAME_LENGTH), unique=True)
    """Digest of the project and the ClientRequestToken: a token makes one job."""
    spec: Mapped[dict[str, Any]]
    """`jobs.JobSpec` of the newest revision, checked before it is stored."""
    revision: Mapped[int] = mapped_column(default=1)
    """Of what was asked for; `Generation.revision` is what a launch was planned from."""
    state: Mapped[str] = mapped_column(String(NAME_LENGTH), index=True)
    reason: Mapped[str]
    transitions: Mapped[list[dict[str, Any]]] = mapped_column(default=list)
    stop_requested_at: Mapped[datetime | None]
    pause_requested_at: Mapped[datetime | None]
    """When a person paused it; none once it was resumed."""
    checkpoint_wanted_step: Mapped[int] = mapped_column(default=-1)
    """A person wants a checkpoint of this step or a later one."""
    checkpoint_wanted_at: Mapped[datetime | None]
    taken_over_at: Mapped[datetime | None]
    """Since when a person looks after it instead of Everstep."""
    taken_over_by: Mapped[str] = mapped_column(default="")
    created_at: Mapped[datetime]
    modified_at: Mapped[datetime]
    """When it came into its state, or a person last changed what is wanted of it."""
    started_at: Mapped[datetime | None]
    """First time that its ranks were started."""
    ended_at: Mapped[datetime | None]
    generation: Mapped[int] = mapped_column(default=0)
    """The newest with a plan; 0 before the first."""
    issued_generation: Mapped[int] = mapped_column(default=0)
    """The highest number that any agent can have seen; never issued again."""
    base_step: Mapped[int] = mapped_column(default=0)
    committed_step: Mapped[int] = mapped_column(default=-1)
    proposed_step: Mapped[int] = mapped_column(default=-1)
    boundary: Mapped[int] = mapped_column(default=-1)
    max_boundary: Mapped[int] = mapped_column(default=-1)
    """The highest boundary that any generation reached."""
    target_step: Mapped[int] = mapped_column(default=-1)
    """Steps finished when its script will be done, as its ranks said last; -1: they have not."""
    committed_at: Mapped[datetime | None]
    failures: Mapped[list[dict[str, Any]]] = mapped_column(default=list)
    """The breaker's memory, in the core's words."""
    accounting: Mapped[dict[str, int]] = mapped_column(default=dict)
    """Microseconds by bucket up to `accounted_until`."""
    accounted_until: Mapped[datetime | None]
    node_microseconds: Mapped[int] = mapped_column(default=0)
    cost_usd: Mapped[float | None]
    memo: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """What the loop must remember between two passes and nobody else reads."""
    lease_owner: Mapped[str | None]
    lease_counter: Mapped[int] = mapped_column(default=0)

    __table_args__ = (
        Index(None, "fleet_name", "state"),
        # What lists are sorted by (`job_lists`), alone and within what they are mostly narrowed to.
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


class Quota(Base):
    """What the jobs of a project may have."""

    __tablename__ = "quota"

    project: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    max_node_count: Mapped[int | None]
    """In each fleet, all its jobs together; none: any."""
    max_job_count: Mapped[int | None]
    """That have not ended, in all fleets; none: any."""
    max_source_bytes: Mapped[int | None]
    """All its archives together, those under way included; none: any."""
    max_priority: Mapped[int] = mapped_column(default=0)
    allowed_role_arns: Mapped[tuple[str, ...]] = mapped_column(default=())
    """What its submitters may name; an entry that ends with `*` allows all that begins like it."""
    allowed_secrets: Mapped[tuple[str, ...]] = mapped_column(default=())
    allowed_data: Mapped[tuple[str, ...]] = mapped_column(default=())


class Generation(Base):
    """One launch of all ranks; its plan never changes."""

    __tablename__ = "generation"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    revision: Mapped[int] = mapped_column(default=1)
    """Of the job's specification that it was planned from."""
    parent: Mapped[int]
    base_step: Mapped[int]
    plan: Mapped[bytes]
    """`everstep.protocol.codec.encode` of the `GenerationPlan`."""
    node_ids: Mapped[tuple[str, ...]] = mapped_column(default=())
    """The plan's, by GROUP_RANK: what lists need of it."""
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]


class Revision(Base):
    """What was changed of a job after it was created; the first one has no row."""

    __tablename__ = "revision"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[datetime]
    changes: Mapped[list[dict[str, Any]]]
    """`revisions.Change`."""


class Shard(Base):
    """One rank's shard, as its owner's agent last reported it."""

    __tablename__ = "shard"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    generation: Mapped[int]
    owner_node_id: Mapped[str] = mapped_column(String(NAME_LENGTH))
    committed_step: Mapped[int]
    payload_bytes: Mapped[int]
    reason: Mapped[str]
    verified: Mapped[list[dict[str, Any]]] = mapped_column(default=list)
    """By holder, the newest step that it holds verified, and since when."""
    updated_at: Mapped[datetime]


class Replica(Base):
    """One holder of a shard; written when the protection changes, never for a step."""

    __tablename__ = "replica"

    run_id: Mapped[str] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    holder_node_id: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    position: Mapped[int]
    """0: the owner's own node."""
    is_in_view: Mapped[bool]
    changed_at: Mapped[datetime]

    __table_args__ = (ForeignKeyConstraint(["run_id", "rank"], ["shard.run_id", "shard.rank"], ondelete="CASCADE"),)


class Checkpoint(Base):
    """A set of shards in S3; complete once its manifest is put."""

    __tablename__ = "checkpoint"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    generation: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[str] = mapped_column(String(NAME_LENGTH))
    bucket: Mapped[str]
    manifest_key: Mapped[str] = mapped_column(String(1024))
    manifest: Mapped[bytes | None]
    """A copy of the object, so that a recovery can be planned without S3."""
    object_bytes: Mapped[int]
    created_at: Mapped[datetime]
    completed_at: Mapped[datetime | None]
    pinned_at: Mapped[datetime | None]
    """When a person pinned it: it is not deleted."""
    verify_requested_at: Mapped[datetime | None] = mapped_column(index=True)
    """When a person asked for its objects to be read back; none once that is done."""
    verified_at: Mapped[datetime | None]
    """When they were last read back."""
    verdict: Mapped[str] = mapped_column(default="")
    """What was wrong then; empty: nothing."""


class Incident(Base):
    """A failure and its recovery."""

    __tablename__ = "incident"

    id: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), index=True)
    job_name: Mapped[str] = mapped_column(String(NAME_LENGTH), index=True)
    project: Mapped[str] = mapped_column(String(NAME_LENGTH))
    phase: Mapped[str] = mapped_column(String(NAME_LENGTH))
    cause: Mapped[str] = mapped_column(String(NAME_LENGTH))
    evidence: Mapped[tuple[str, ...]] = mapped_column(default=())
    decision: Mapped[str] = mapped_column(default="")
    reason: Mapped[str] = mapped_column(default="")
    restore_source: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    from_step: Mapped[int | None]
    reached_step: Mapped[int | None]
    """The highest boundary before the failure."""
    lost_steps: Mapped[int | None]
    generation_before: Mapped[int]
    generation_after: Mapped[int | None]
    instance_ids: Mapped[tuple[str, ...]] = mapped_column(default=())
    faulted_instance_ids: Mapped[tuple[str, ...]] = mapped_column(default=())
    """Where it happened, lost by it or not."""
    lost_node_count: Mapped[int] = mapped_column(default=0)
    """Of those that were left, how many failed or were taken by AWS."""
    replacement_instance_ids: Mapped[tuple[str, ...]] = mapped_column(default=())
    failed_at: Mapped[datetime]
    opened_at: Mapped[datetime]
    replaced_at: Mapped[datetime | None]
    restored_at: Mapped[datetime | None]
    closed_at: Mapped[datetime | None]
    detect_seconds: Mapped[float | None]
    replace_seconds: Mapped[float | None]
    restore_seconds: Mapped[float | None]
    rework_seconds: Mapped[float | None]
    cost_usd: Mapped[float | None]
    rank_sources: Mapped[tuple[tuple[str, int], ...]] = mapped_column(default=())
    """Where each rank's shard came from, by rank: `[["local", 2], ["peer", 1]]`."""
    acknowledged_at: Mapped[datetime | None]
    acknowledged_by: Mapped[str] = mapped_column(default="")
    acknowledgement: Mapped[str] = mapped_column(default="")
    detail: Mapped[dict[str, Any]] = mapped_column(default=dict)

    __table_args__ = (Index(None, "opened_at", "id"),)  # what lists are sorted by


class Drill(Base):
    """Something of a job that is broken on purpose."""

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


class MetricLog(Base):
    """Whose logged values a run had last, and how many were lost on their way."""

    __tablename__ = "metric_log"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    generation: Mapped[int]
    """The newest that has logged anything."""
    agent_id: Mapped[str]
    next_number: Mapped[int]
    """Of that agent's values: those before it are stored, or lost."""
    dropped_count: Mapped[int]


class Metric(Base):
    """One name under which a run's script logs."""

    __tablename__ = "metric"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    fine_from_step: Mapped[int]
    """Earlier steps are folded: a value of theirs that comes late has no place any more."""
    last_step: Mapped[int]
    last_at: Mapped[datetime]
    last_value: Mapped[str] = mapped_column(String(NAME_LENGTH))
    """As Python writes it: SQLite makes NULL of a NaN."""


class MetricChunk(Base):
    """Points of one metric and width, packed (`metrics.pack`)."""

    __tablename__ = "metric_chunk"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    width: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    points: Mapped[bytes]
    nodes: Mapped[tuple[str, ...]] = mapped_column(default=())
    """The node of each point's least, then of each point's most; empty for what a script logs."""


class Event(Base):
    """Something that happened; never changed.

    An id is never given twice, not even once the newest events are let go: clients go on from it.
    """

    __tablename__ = "event"
    __table_args__ = ({"sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(_BigId, primary_key=True, autoincrement=True)
    at: Mapped[datetime]
    type: Mapped[str] = mapped_column(String(NAME_LENGTH))
    message: Mapped[str]
    project: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    fleet_name: Mapped[str | None] = mapped_column(String(NAME_LENGTH), index=True)
    job_name: Mapped[str | None] = mapped_column(String(NAME_LENGTH), index=True)
    node_id: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    detail: Mapped[dict[str, Any]] = mapped_column(default=dict)


class Export(Base):
    """How far events have been told to one place outside."""

    __tablename__ = "export"

    name: Mapped[str] = mapped_column(String(512), primary_key=True)
    position: Mapped[int]
    """Id of the last event that was told."""
    failing_since: Mapped[datetime | None]
    failure: Mapped[str]
    lease_owner: Mapped[str | None]
    lease_counter: Mapped[int] = mapped_column(default=0)


class LogExport(Base):
    """How far the log of a run has been copied to the log group."""

    __tablename__ = "log_export"

    run_id: Mapped[str] = mapped_column(ForeignKey("job.run_id", ondelete="CASCADE"), primary_key=True)
    cursor: Mapped[str]
    """`loop.log_exporter.text_of`."""
    is_over: Mapped[bool]
    """Nothing will ever follow."""


class Intent(Base):
    """An effect on the world that is about to be tried, written before it is."""

    __tablename__ = "intent"

    key: Mapped[str] = mapped_column(primary_key=True)
    """Idempotency key: the same effect has the same key."""
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


class Token(Base):
    """A bearer token, known by its digest alone."""

    __tablename__ = "token"

    id: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    """SHA-256 of the token, hexadecimal. Tokens have 256 random bits: a slow hash would protect nothing."""
    kind: Mapped[str] = mapped_column(String(NAME_LENGTH))
    role: Mapped[str] = mapped_column(String(NAME_LENGTH))
    project: Mapped[str] = mapped_column(String(NAME_LENGTH), default="")
    fleet_name: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    node_id: Mapped[str | None] = mapped_column(String(NAME_LENGTH), index=True)
    description: Mapped[str] = mapped_column(default="")
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class SpentNonce(Base):
    """An agent has joined with a nonce; nobody can join with it again."""

    __tablename__ = "spent_nonce"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    ends_at: Mapped[datetime]


class Source(Base):
    """A user's source archive, checked and stored."""

    __tablename__ = "source"

    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    project: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    """It has shown the whole archive; others that name the digest get nothing."""
    bucket: Mapped[str]
    key: Mapped[str] = mapped_column(String(1024))
    archive_bytes: Mapped[int]
    unpacked_bytes: Mapped[int]
    files: Mapped[tuple[str, ...]]
    created_at: Mapped[datetime]


class SourceUpload(Base):
    """Room in a project's quota for an archive under way, from its announcement until it is stored or expires."""

    __tablename__ = "source_upload"

    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    project: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    archive_bytes: Mapped[int]
    expires_at: Mapped[datetime]

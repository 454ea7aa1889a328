"""The initial schema."""

from __future__ import annotations

import sqlalchemy as sa

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Migrate to this version from an empty database."""
    op.create_table(
        "event",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("type", sa.String(length=64), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("fleet_name", sa.String(length=64), nullable=True),
        sa.Column("job_name", sa.String(length=64), nullable=True),
        sa.Column("node_id", sa.String(length=64), nullable=True),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("event", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_event_fleet_name"), ["fleet_name"], unique=False)
        batch_op.create_index(batch_op.f("ix_event_job_name"), ["job_name"], unique=False)

    op.create_table(
        "fleet",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("auto_scaling_group_name", sa.Text(), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("delete_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("min_node_count", sa.BigInteger(), nullable=False),
        sa.Column("spare_count", sa.BigInteger(), nullable=False),
        sa.Column("spare_probability", sa.Float(), nullable=True),
        sa.Column("hold_failed_instances", sa.Boolean(), nullable=False),
        sa.Column("max_replacements_per_hour", sa.BigInteger(), nullable=False),
        sa.Column("node_role_name", sa.Text(), nullable=False),
        sa.Column("allow_drills", sa.Boolean(), nullable=False),
        sa.Column("allow_commands", sa.Boolean(), nullable=False),
        sa.Column("blindness_lifted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("max_node_count", sa.BigInteger(), nullable=False),
        sa.Column("instance_type", sa.Text(), nullable=False),
        sa.Column("availability_zone", sa.Text(), nullable=False),
        sa.Column("price_usd_per_hour", sa.Float(), nullable=True),
        sa.Column("desired_node_count", sa.BigInteger(), nullable=False),
        sa.Column("vacancies", sa.JSON(), nullable=False),
        sa.Column("drift", sa.JSON(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("idle_microseconds", sa.JSON(), nullable=False),
        sa.Column("idle_counts", sa.JSON(), nullable=False),
        sa.Column("idle_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_counter", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_fleet")),
        sa.UniqueConstraint("auto_scaling_group_name", name=op.f("uq_fleet_auto_scaling_group_name")),
    )
    op.create_table(
        "implication",
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("incident_id", sa.String(length=96), nullable=False),
        sa.Column("fleet_name", sa.String(length=64), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("what", sa.String(length=64), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("is_own_word", sa.Boolean(), nullable=False),
        sa.Column("remedy", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("node_id", "incident_id", name=op.f("pk_implication")),
    )
    with op.batch_alter_table("implication", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_implication_fleet_name"), ["fleet_name"], unique=False)

    op.create_table(
        "intent",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("lease_owner", sa.Text(), nullable=False),
        sa.Column("lease_counter", sa.BigInteger(), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("attempt_count", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_intent")),
    )
    with op.batch_alter_table("intent", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_intent_subject"), ["subject"], unique=False)

    op.create_table(
        "job",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("fleet_name", sa.String(length=64), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("priority", sa.BigInteger(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("request_digest", sa.String(length=64), nullable=True),
        sa.Column("request_token", sa.String(length=64), nullable=True),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("transitions", sa.JSON(), nullable=False),
        sa.Column("stop_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("pause_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("taken_over_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("taken_over_by", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("checkpoint_wanted_step", sa.BigInteger(), nullable=False),
        sa.Column("checkpoint_wanted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("modified_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("issued_generation", sa.BigInteger(), nullable=False),
        sa.Column("base_step", sa.BigInteger(), nullable=False),
        sa.Column("committed_step", sa.BigInteger(), nullable=False),
        sa.Column("proposed_step", sa.BigInteger(), nullable=False),
        sa.Column("boundary", sa.BigInteger(), nullable=False),
        sa.Column("max_boundary", sa.BigInteger(), nullable=False),
        sa.Column("target_step", sa.BigInteger(), nullable=False),
        sa.Column("committed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("failures", sa.JSON(), nullable=False),
        sa.Column("accounting", sa.JSON(), nullable=False),
        sa.Column("accounted_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("node_microseconds", sa.BigInteger(), nullable=False),
        sa.Column("cost_usd", sa.Float(), nullable=True),
        sa.Column("memo", sa.JSON(), nullable=False),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_counter", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_job")),
        sa.UniqueConstraint("project", "name", name=op.f("uq_job_project_name")),
        sa.UniqueConstraint("request_token", name=op.f("uq_job_request_token")),
    )
    with op.batch_alter_table("job", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_job_fleet_name"), ["fleet_name"], unique=False)
        batch_op.create_index(batch_op.f("ix_job_fleet_name_state"), ["fleet_name", "state"], unique=False)
        batch_op.create_index(batch_op.f("ix_job_state"), ["state"], unique=False)
        batch_op.create_index(batch_op.f("ix_job_created_at_run_id"), ["created_at", "run_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_job_modified_at_run_id"), ["modified_at", "run_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_job_name_run_id"), ["name", "run_id"], unique=False)
        batch_op.create_index(
            batch_op.f("ix_job_project_created_at_run_id"), ["project", "created_at", "run_id"], unique=False
        )
        batch_op.create_index(
            batch_op.f("ix_job_project_modified_at_run_id"), ["project", "modified_at", "run_id"], unique=False
        )
        batch_op.create_index(batch_op.f("ix_job_project_name_run_id"), ["project", "name", "run_id"], unique=False)
        batch_op.create_index(
            batch_op.f("ix_job_fleet_name_created_at_run_id"), ["fleet_name", "created_at", "run_id"], unique=False
        )
        batch_op.create_index(
            batch_op.f("ix_job_state_created_at_run_id"), ["state", "created_at", "run_id"], unique=False
        )
        batch_op.create_index(
            batch_op.f("ix_job_ended_at_created_at_run_id"), ["ended_at", "created_at", "run_id"], unique=False
        )

    op.create_table(
        "node",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("fleet_name", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.String(length=64), nullable=True),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("peer_port", sa.BigInteger(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("agent_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("instance_type", sa.Text(), nullable=False),
        sa.Column("availability_zone", sa.Text(), nullable=False),
        sa.Column("failure_domain", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("hold", sa.String(length=64), nullable=True),
        sa.Column("release", sa.String(length=64), nullable=False),
        sa.Column("request", sa.String(length=64), nullable=False),
        sa.Column("request_words", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("replaced_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("returned_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("evidence_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("wanted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("connected_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("joined_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("arrival_seconds", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_node")),
    )
    with op.batch_alter_table("node", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_node_fleet_name"), ["fleet_name"], unique=False)
        batch_op.create_index(batch_op.f("ix_node_run_id"), ["run_id"], unique=False)

    op.create_table(
        "notice",
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("source", sa.String(length=64), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("node_id", "kind", "event_id", name=op.f("pk_notice")),
    )
    op.create_table(
        "source",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("bucket", sa.Text(), nullable=False),
        sa.Column("key", sa.String(length=1024), nullable=False),
        sa.Column("archive_bytes", sa.BigInteger(), nullable=False),
        sa.Column("unpacked_bytes", sa.BigInteger(), nullable=False),
        sa.Column("files", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("sha256", "project", name=op.f("pk_source")),
    )
    op.create_table(
        "source_upload",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("archive_bytes", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("sha256", "project", name=op.f("pk_source_upload")),
    )
    op.create_table(
        "spent_nonce",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_spent_nonce")),
    )
    op.create_table(
        "token",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=64), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("fleet_name", sa.String(length=64), nullable=True),
        sa.Column("node_id", sa.String(length=64), nullable=True),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_token")),
        sa.UniqueConstraint("digest", name=op.f("uq_token_digest")),
    )
    with op.batch_alter_table("token", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_token_node_id"), ["node_id"], unique=False)

    op.create_table(
        "checkpoint",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("bucket", sa.Text(), nullable=False),
        sa.Column("manifest_key", sa.String(length=1024), nullable=False),
        sa.Column("manifest", sa.LargeBinary(), nullable=True),
        sa.Column("object_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("completed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("pinned_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("verify_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("verified_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["job.run_id"], name=op.f("fk_checkpoint_run_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "generation", "step", name=op.f("pk_checkpoint")),
    )
    with op.batch_alter_table("checkpoint", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_checkpoint_verify_requested_at"), ["verify_requested_at"], unique=False)

    op.create_table(
        "quota",
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("max_node_count", sa.BigInteger(), nullable=True),
        sa.Column("max_job_count", sa.BigInteger(), nullable=True),
        sa.Column("max_source_bytes", sa.BigInteger(), nullable=True),
        sa.Column("max_priority", sa.BigInteger(), nullable=False),
        sa.Column("allowed_role_arns", sa.JSON(), nullable=False),
        sa.Column("allowed_secrets", sa.JSON(), nullable=False),
        sa.Column("allowed_data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_quota")),
    )
    op.create_table(
        "export",
        sa.Column("name", sa.String(length=512), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("failing_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("failure", sa.Text(), nullable=False),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_counter", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_export")),
    )
    op.create_table(
        "log_export",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("cursor", sa.Text(), nullable=False),
        sa.Column("is_over", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["job.run_id"], name=op.f("fk_log_export_run_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_log_export")),
    )
    op.create_table(
        "metric_log",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("agent_id", sa.Text(), nullable=False),
        sa.Column("next_number", sa.BigInteger(), nullable=False),
        sa.Column("dropped_count", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["job.run_id"], name=op.f("fk_metric_log_run_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_metric_log")),
    )
    op.create_table(
        "metric",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("fine_from_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_value", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["job.run_id"], name=op.f("fk_metric_run_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "name", name=op.f("pk_metric")),
    )
    op.create_table(
        "metric_chunk",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("width", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("points", sa.LargeBinary(), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"], ["job.run_id"], name=op.f("fk_metric_chunk_run_id_job"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "name", "width", "number", name=op.f("pk_metric_chunk")),
    )
    op.create_table(
        "revision",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("changes", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["job.run_id"], name=op.f("fk_revision_run_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_revision")),
    )
    op.create_table(
        "drill",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("job_name", sa.String(length=64), nullable=False),
        sa.Column("fleet_name", sa.String(length=64), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("node_id", sa.String(length=64), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=True),
        sa.Column("requested_by", sa.Text(), nullable=False),
        sa.Column("requested_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.String(length=64), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("struck_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("incident_id", sa.String(length=64), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["job.run_id"], name=op.f("fk_drill_run_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_drill")),
    )
    with op.batch_alter_table("drill", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_drill_run_id"), ["run_id"], unique=False)

    op.create_table(
        "generation",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("parent", sa.BigInteger(), nullable=False),
        sa.Column("base_step", sa.BigInteger(), nullable=False),
        sa.Column("world_size", sa.BigInteger(), nullable=False),
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("node_ids", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["job.run_id"], name=op.f("fk_generation_run_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_generation")),
    )
    op.create_table(
        "incident",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("job_name", sa.String(length=64), nullable=False),
        sa.Column("project", sa.String(length=64), nullable=False),
        sa.Column("phase", sa.String(length=64), nullable=False),
        sa.Column("cause", sa.String(length=64), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("decision", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("restore_source", sa.String(length=64), nullable=True),
        sa.Column("from_step", sa.BigInteger(), nullable=True),
        sa.Column("reached_step", sa.BigInteger(), nullable=True),
        sa.Column("lost_steps", sa.BigInteger(), nullable=True),
        sa.Column("generation_before", sa.BigInteger(), nullable=False),
        sa.Column("generation_after", sa.BigInteger(), nullable=True),
        sa.Column("instance_ids", sa.JSON(), nullable=False),
        sa.Column("faulted_instance_ids", sa.JSON(), nullable=False),
        sa.Column("lost_node_count", sa.BigInteger(), nullable=False),
        sa.Column("node_count_before", sa.BigInteger(), nullable=False),
        sa.Column("node_count_after", sa.BigInteger(), nullable=False),
        sa.Column("replacement_instance_ids", sa.JSON(), nullable=False),
        sa.Column("failed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("replaced_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("restored_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("detect_seconds", sa.Float(), nullable=True),
        sa.Column("replace_seconds", sa.Float(), nullable=True),
        sa.Column("restore_seconds", sa.Float(), nullable=True),
        sa.Column("rework_seconds", sa.Float(), nullable=True),
        sa.Column("cost_usd", sa.Float(), nullable=True),
        sa.Column("rank_sources", sa.JSON(), nullable=False),
        sa.Column("acknowledged_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("acknowledged_by", sa.Text(), nullable=False),
        sa.Column("acknowledgement", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["job.run_id"], name=op.f("fk_incident_run_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_incident")),
    )
    with op.batch_alter_table("incident", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_incident_opened_at_id"), ["opened_at", "id"], unique=False)
        batch_op.create_index(batch_op.f("ix_incident_run_id"), ["run_id"], unique=False)

    op.create_table(
        "note",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("incident_id", sa.String(length=64), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("request_token", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(
            ["incident_id"], ["incident.id"], name=op.f("fk_note_incident_id_incident"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["run_id"], ["job.run_id"], name=op.f("fk_note_run_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_note")),
        sa.UniqueConstraint("request_token", name=op.f("uq_note_request_token")),
    )
    with op.batch_alter_table("note", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_note_run_id"), ["run_id"], unique=False)

    op.create_table(
        "shard",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("owner_node_id", sa.String(length=64), nullable=False),
        sa.Column("committed_step", sa.BigInteger(), nullable=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("verified", sa.JSON(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["job.run_id"], name=op.f("fk_shard_run_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "rank", name=op.f("pk_shard")),
    )
    op.create_table(
        "replica",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("rank", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("holder_node_id", sa.String(length=64), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("is_in_view", sa.Boolean(), nullable=False),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id", "rank"],
            ["shard.run_id", "shard.rank"],
            name=op.f("fk_replica_run_id_rank_shard"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("run_id", "rank", "holder_node_id", name=op.f("pk_replica")),
    )
    op.create_table(
        "fleet_hour",
        sa.Column("fleet_name", sa.String(length=64), nullable=False),
        sa.Column("hour", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("idle_microseconds", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["fleet_name"], ["fleet.name"], name=op.f("fk_fleet_hour_fleet_name_fleet"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("fleet_name", "hour", name=op.f("pk_fleet_hour")),
    )
    op.create_table(
        "job_hour",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("hour", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("accounting", sa.JSON(), nullable=False),
        sa.Column("node_microseconds", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["job.run_id"], name=op.f("fk_job_hour_run_id_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "hour", name=op.f("pk_job_hour")),
    )


def downgrade() -> None:
    """Drop all tables of this version."""
    op.drop_table("job_hour")
    op.drop_table("fleet_hour")
    op.drop_table("replica")
    op.drop_table("shard")
    with op.batch_alter_table("note", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_note_run_id"))

    op.drop_table("note")
    with op.batch_alter_table("incident", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_incident_run_id"))
        batch_op.drop_index(batch_op.f("ix_incident_opened_at_id"))

    op.drop_table("incident")
    with op.batch_alter_table("drill", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_drill_run_id"))

    op.drop_table("drill")
    op.drop_table("generation")
    op.drop_table("revision")
    op.drop_table("metric_chunk")
    op.drop_table("metric")
    op.drop_table("metric_log")
    op.drop_table("log_export")
    op.drop_table("export")
    op.drop_table("quota")
    with op.batch_alter_table("checkpoint", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_checkpoint_verify_requested_at"))

    op.drop_table("checkpoint")
    with op.batch_alter_table("token", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_token_node_id"))

    op.drop_table("token")
    op.drop_table("spent_nonce")
    op.drop_table("source_upload")
    op.drop_table("source")
    op.drop_table("notice")
    with op.batch_alter_table("node", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_node_run_id"))
        batch_op.drop_index(batch_op.f("ix_node_fleet_name"))

    op.drop_table("node")
    with op.batch_alter_table("job", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_job_state"))
        batch_op.drop_index(batch_op.f("ix_job_created_at_run_id"))
        batch_op.drop_index(batch_op.f("ix_job_modified_at_run_id"))
        batch_op.drop_index(batch_op.f("ix_job_name_run_id"))
        batch_op.drop_index(batch_op.f("ix_job_project_created_at_run_id"))
        batch_op.drop_index(batch_op.f("ix_job_project_modified_at_run_id"))
        batch_op.drop_index(batch_op.f("ix_job_project_name_run_id"))
        batch_op.drop_index(batch_op.f("ix_job_fleet_name_created_at_run_id"))
        batch_op.drop_index(batch_op.f("ix_job_state_created_at_run_id"))
        batch_op.drop_index(batch_op.f("ix_job_ended_at_created_at_run_id"))
        batch_op.drop_index(batch_op.f("ix_job_fleet_name_state"))
        batch_op.drop_index(batch_op.f("ix_job_fleet_name"))

    op.drop_table("job")
    with op.batch_alter_table("intent", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_intent_subject"))

    op.drop_table("intent")
    with op.batch_alter_table("implication", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_implication_fleet_name"))

    op.drop_table("implication")
    op.drop_table("fleet")
    with op.batch_alter_table("event", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_event_job_name"))
        batch_op.drop_index(batch_op.f("ix_event_fleet_name"))

    op.drop_table("event")

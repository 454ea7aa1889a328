"""Checks what a project's submitters may use: AWS resources, and the highest priority. Pure.

Nodes use their own permissions for secrets, inputs and outputs, which may cover other projects' resources. Therefore an
administrator sets allow-lists per project (PutProjectQuota); without a quota, all are empty. With an allowed RoleArn,
that role's permissions decide. Administrators have no limits.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass

from control_plane.api.errors import invalid
from control_plane.api.schemas.jobs import CreateTrainingJobRequest
from control_plane.db.quotas import QuotaRecord


@dataclass(frozen=True, slots=True)
class Allowance:
    """The allow-lists and the priority limit of one project."""

    quota: QuotaRecord

    def refused(self, request: CreateTrainingJobRequest) -> Iterator[tuple[str, str]]:
        """Yield a field error for each role, secret, input, location and priority that is not allowed."""
        quota = self.quota
        if request.priority > quota.max_priority:
            yield self._priority(request.priority)
        role = request.role_arn
        if role is not None and not _allows(quota.allowed_role_arns, role):
            yield self._not_given("RoleArn", role, "--allow-role")
        if role is None:
            for name, secret in request.secrets.items():
                if not _allows(quota.allowed_secrets, secret):
                    yield self._not_given(f"Secrets.{name}", secret, "--allow-secret")
        for field, uri in (
            ("CheckpointConfig.S3Uri", request.checkpoint_config.s3_uri),
            ("OutputDataConfig.S3OutputPath", request.output_data_config.s3_output_path),
        ):
            # Nodes write to these locations with their own permissions, also if the job has a role.
            if uri is not None and not _allows(quota.allowed_data, uri):
                yield self._not_given(field, uri, "--allow-data")
        for index, channel in enumerate(request.input_data_config):
            field = f"InputDataConfig[{index}].DataSource"
            objects, directory = channel.data_source.s3_data_source, channel.data_source.file_system_data_source
            if role is None and objects is not None and not _allows(quota.allowed_data, objects.s3_uri):
                yield self._not_given(f"{field}.S3DataSource.S3Uri", objects.s3_uri, "--allow-data")
            if directory is not None and not _allows(quota.allowed_data, posixpath.normpath(directory.directory_path)):
                yield self._not_given(
                    f"{field}.FileSystemDataSource.DirectoryPath", directory.directory_path, "--allow-data"
                )

    def require_priority(self, priority: int) -> None:
        """Raise InvalidRequest if the priority exceeds the project's limit."""
        if priority > self.quota.max_priority:
            raise invalid(*self._priority(priority))

    def _priority(self, priority: int) -> tuple[str, str]:
        project, highest = self.quota.project, self.quota.max_priority
        message = (
            f"is {priority}; submitters of the project {project!r} may set at most {highest} (everstep quotas set "
            f"{project} --max-priority)"
        )
        return "Priority", message

    def _not_given(self, field: str, name: str, option: str) -> tuple[str, str]:
        project = self.quota.project
        message = (
            f"the project {project!r} may not use {name!r}; an administrator can allow it: everstep quotas set "
            f"{project} {option} ..."
        )
        return field, message


def allowance_of(project: str, quota: QuotaRecord | None) -> Allowance:
    """Return what a project's jobs may use; without a quota nothing, and no priority above 0."""
    return Allowance(quota or QuotaRecord(project=project, max_node_count=None, max_job_count=None))


def _allows(entries: tuple[str, ...], name: str) -> bool:
    return any(name.startswith(entry[:-1]) if entry.endswith("*") else name == entry for entry in entries)

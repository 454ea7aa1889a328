"""`everstep quotas …`: limits of each project, and the AWS resources that its submitters may use."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.commands import Pages, Service, Shown, command
from everstep.cli.output import Json, Rows, counted, size, without_none
from everstep.cli.tables import Columns

app = typer.Typer(no_args_is_help=True, add_completion=False)

Project = Annotated[str, typer.Argument(help="Name of the project.")]


@command(app, "list")
def list_quotas(service: Service, pages: Pages) -> Shown:
    """List quotas, sorted by project."""
    answer = pages.of(service, "list_project_quotas")
    columns: Columns = {
        "PROJECT": "Project",
        "NODES OF A FLEET": lambda quota: str(quota.get("MaxNodeCount", "any")),
        "JOBS": lambda quota: str(quota.get("MaxJobCount", "any")),
        "SOURCES": lambda quota: size(quota["MaxSourceBytes"]) if "MaxSourceBytes" in quota else "any",
        "PRIORITY": lambda quota: str(quota["MaxPriority"]),
        "MAY NAME": lambda quota: (
            ", ".join((*quota["AllowedRoleArns"], *quota["AllowedSecrets"], *quota["AllowedData"])) or "-"
        ),
    }
    return Shown(answer, Rows(answer["Quotas"], columns, empty="No project has a quota."))


@command(app, "set")
def set_quota(
    service: Service,
    project: Project,
    max_node_count: Annotated[
        int | None,
        typer.Option(min=0, help="Maximum number of nodes per fleet for all jobs of the project; by default no limit."),
    ] = None,
    max_job_count: Annotated[
        int | None, typer.Option(min=0, help="Maximum number of unfinished jobs; by default no limit.")
    ] = None,
    max_source_bytes: Annotated[
        int | None, typer.Option(min=0, help="Maximum total size of source archives; by default no limit.")
    ] = None,
    max_priority: Annotated[int, typer.Option(help="Highest priority that submitters may set.")] = 0,
    allow_role: Annotated[
        list[str] | None,
        typer.Option(help="ARN of a role that submitters may use; may be repeated, and may end with *."),
    ] = None,
    allow_secret: Annotated[
        list[str] | None,
        typer.Option(help="Secret that submitters may use without a role; may be repeated, and may end with *."),
    ] = None,
    allow_data: Annotated[
        list[str] | None,
        typer.Option(
            help="S3 URI or directory of inputs (without a role), checkpoints, outputs; may be repeated and end with *."
        ),
    ] = None,
) -> Shown:
    """Replace the quota of a project.

    Limits that you do not pass are removed. Roles, secrets and data locations that you do not pass are forbidden.
    """
    quota = service.put_project_quota(
        Project=project,
        MaxPriority=max_priority,
        AllowedRoleArns=allow_role or [],
        AllowedSecrets=allow_secret or [],
        AllowedData=allow_data or [],
        **without_none(MaxNodeCount=max_node_count, MaxJobCount=max_job_count, MaxSourceBytes=max_source_bytes),
    )
    nodes, jobs = _limit(quota, "MaxNodeCount", "node"), _limit(quota, "MaxJobCount", "job")
    return Shown(quota, f"{project}: at most {nodes} of each fleet and {jobs} in progress")


@command(app)
def delete(service: Service, project: Project) -> Shown:
    """Delete a project's quota."""
    quota = service.delete_project_quota(Project=project)
    return Shown(quota, f"{project} has no quota now")


def _limit(quota: Json, field: str, noun: str) -> str:
    return counted(quota[field], noun) if field in quota else f"any number of {noun}s"

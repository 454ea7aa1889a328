"""`everstep quotas …`: limits of each project, and the AWS resources that its submitters may use."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from everstep.cli.commands import Pages, Service, Shown, command
from everstep.cli.output import Json, Rows, counted, size
from everstep.cli.request_options import FieldsOf
from everstep.cli.submission import Request
from everstep.cli.tables import Columns

app = typer.Typer(no_args_is_help=True, add_completion=False)

Project = Annotated[str, typer.Argument(help="Name of the project.")]
_NAMES: Final = {
    "AllowedRoleArns": "--allow-role",
    "AllowedSecrets": "--allow-secret",
    "AllowedData": "--allow-data",
}


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
    *,
    fields: Annotated[Request, FieldsOf("PutProjectQuota", _NAMES)],
) -> Shown:
    """Replace the quota of a project.

    Limits that you do not pass are removed. Roles, secrets and data locations that you do not pass are forbidden.
    """
    quota = service.put_project_quota(Project=project, **fields)
    nodes, jobs = _limit(quota, "MaxNodeCount", "node"), _limit(quota, "MaxJobCount", "job")
    return Shown(quota, f"{project}: at most {nodes} of each fleet and {jobs} in progress")


@command(app)
def delete(service: Service, project: Project) -> Shown:
    """Delete a project's quota."""
    quota = service.delete_project_quota(Project=project)
    return Shown(quota, f"{project} has no quota now")


def _limit(quota: Json, field: str, noun: str) -> str:
    return counted(quota[field], noun) if field in quota else f"any number of {noun}s"

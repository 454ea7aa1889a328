"""`everstep quotas …`: how many nodes and jobs each project may have."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.output import Columns, Json, Output, OutputFormat, connect, show_json, show_rows, without_none

app = typer.Typer(help="What the jobs of each project may have.", no_args_is_help=True)

Project = Annotated[str, typer.Argument(help="Name of the project.")]


@app.command("list")
def list_quotas(output: Output = OutputFormat.TABLE) -> None:
    """List quotas, by project."""
    with connect() as service:
        answer = service.list_project_quotas()
    if output is OutputFormat.JSON:
        show_json(answer)
        return
    columns: Columns = {
        "PROJECT": "Project",
        "NODES OF A FLEET": lambda quota: _limit(quota, "MaxNodeCount"),
        "JOBS": lambda quota: _limit(quota, "MaxJobCount"),
    }
    show_rows(answer["Quotas"], columns, empty="No project has a quota.")


@app.command("set")
def set_quota(
    project: Project,
    max_node_count: Annotated[int | None, typer.Option(min=0, help="Nodes of each fleet that all its jobs may hold; no limit unless said.")] = None,
    max_job_count: Annotated[int | None, typer.Option(min=0, help="Jobs that have not ended; no limit unless said.")] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Set a project's quota, in place of the one that it had."""
    with connect() as service:
        quota = service.put_project_quota(**without_none(Project=project, MaxNodeCount=max_node_count, MaxJobCount=max_job_count))
    if output is OutputFormat.JSON:
        show_json(quota)
        return
    typer.echo(f"{project} may hold {_limit(quota, 'MaxNodeCount')} nodes of each fleet, and have {_limit(quota, 'MaxJobCount')} jobs under way")


@app.command()
def delete(project: Project, output: Output = OutputFormat.TABLE) -> None:
    """Lift a project's quota."""
    with connect() as service:
        quota = service.delete_project_quota(Project=project)
    if output is OutputFormat.JSON:
        show_json(quota)
        return
    typer.echo(f"{project} has no quota any more")


def _limit(quota: Json, field: str) -> str:
    return str(quota.get(field, "any number of"))

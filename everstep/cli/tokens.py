"""`everstep tokens …` and `everstep whoami`: who may call the service, and as what."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from everstep.cli.output import (
    Columns,
    Json,
    Output,
    OutputFormat,
    connect,
    listed,
    moment,
    say,
    show_facts,
    show_json,
    show_rows,
    when,
    without_none,
)

app = typer.Typer(help="Who may call the service, and as what.", no_args_is_help=True)


class Role(StrEnum):
    """What a token may do."""

    ADMIN = "admin"
    SUBMITTER = "submitter"
    VIEWER = "viewer"


@app.command()
def create(
    role: Annotated[Role, typer.Option(help="viewer reads, submitter also runs jobs, admin does everything in every project.")],
    project: Annotated[str | None, typer.Option(help="The only project that it opens; every project unless said.")] = None,
    description: Annotated[str, typer.Option(help="Whose it is, or what for.")] = "",
    expires_in_seconds: Annotated[int | None, typer.Option(min=60, help="It does not expire unless said.")] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Make a token. It is printed once and known nowhere else."""
    with connect() as service:
        made = service.create_token(Role=role.value, Description=description, **without_none(Project=project, ExpiresInSeconds=expires_in_seconds))
    if output is OutputFormat.JSON:
        show_json(made)
        return
    typer.echo(made["Secret"])
    say(f"It is shown this once. Its id is {made['Token']['TokenId']}; everstep configure writes it down, everstep tokens revoke ends it.")


@app.command("list")
def list_tokens(
    project: Annotated[str | None, typer.Option(help="Only of this project.")] = None,
    ended: Annotated[bool, typer.Option("--ended", help="Also those that are revoked or have expired.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Tokens to show at most.")] = 100,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List tokens, oldest first. Secrets are known to nobody but those who have them."""
    with connect() as service:
        rows = listed(service, "list_tokens", limit, Project=project, IncludeEnded=ended)
    if output is OutputFormat.JSON:
        show_json({"Tokens": rows})
        return
    columns: Columns = {
        "ID": "TokenId",
        "ROLE": lambda token: "join" if token["Kind"] == "join" else token["Role"],
        "PROJECT": lambda token: token.get("FleetName") or token.get("Project") or "every",
        "DESCRIPTION": "Description",
        "CREATED (UTC)": lambda token: when(token["CreationTime"]),
        "EXPIRES (UTC)": lambda token: when(token.get("ExpirationTime")) or "never",
        "REVOKED (UTC)": lambda token: when(token.get("RevocationTime")),
    }
    show_rows(rows, columns, empty="No tokens.")


@app.command()
def revoke(token_id: Annotated[str, typer.Argument(help="Id of the token, as tokens list shows it.")], output: Output = OutputFormat.TABLE) -> None:
    """End a token at once: for requests, for browsers signed in with it, and for answers that still go on."""
    with connect() as service:
        token = service.revoke_token(TokenId=token_id)
    if output is OutputFormat.JSON:
        show_json(token)
        return
    typer.echo(f"{token_id} is revoked since {moment(token.get('RevocationTime'))}")


def whoami(output: Output = OutputFormat.TABLE) -> None:
    """Say who the service takes you for: role, project, and how long that lasts."""
    with connect() as service:
        identity: Json = service.get_caller_identity()
    if output is OutputFormat.JSON:
        show_json(identity)
        return
    show_facts(
        [
            ("token", identity["TokenId"]),
            ("role", identity["Role"]),
            ("project", identity.get("Project") or "every"),
            ("description", identity["Description"] or None),
            ("created", moment(identity["CreationTime"])),
            ("expires", moment(identity.get("ExpirationTime")) or "never"),
            ("server", f"version {identity['ServerVersion']}"),
        ]
    )

"""`everstep tokens …`: create, list and revoke the tokens that authorize callers of the service."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from everstep.cli.commands import Pages, Service, Shown, command
from everstep.cli.output import Rows, moment, when
from everstep.cli.request_options import FieldsOf
from everstep.cli.submission import Request
from everstep.cli.tables import Columns, Detail, Prose

app = typer.Typer(no_args_is_help=True, add_completion=False)


class Role(StrEnum):
    """The permissions of a token."""

    ADMIN = "admin"
    SUBMITTER = "submitter"
    VIEWER = "viewer"


@command(app)
def create(
    service: Service,
    role: Annotated[
        Role, typer.Option(help="viewer reads, submitter also runs jobs, admin may do everything in every project.")
    ],
    *,
    fields: Annotated[Request, FieldsOf("CreateToken", {"Role": "", "ExpiresInSeconds": "--expires-in-seconds"})],
) -> Shown:
    """Create a token. It is printed once, and the service does not store its secret."""
    made = service.create_token(Role=role.value, **fields)
    note = (
        f"The token is shown only once. Its id is {made['Token']['TokenId']}. Store it with everstep configure; end "
        "it with everstep tokens revoke."
    )
    return Shown(made, made["Secret"], note)


@command(app, "list")
def list_tokens(
    service: Service,
    pages: Pages,
    project: Annotated[str | None, typer.Option(help="Only tokens of this project.")] = None,
    ended: Annotated[bool, typer.Option("--ended", help="Include revoked and expired tokens.")] = False,
) -> Shown:
    """List tokens, oldest first. The list has no secrets."""
    answer = pages.of(service, "list_tokens", Project=project, IncludeEnded=ended)
    columns: Columns = {
        "ID": "TokenId",
        "ROLE": lambda token: "join" if token["Kind"] == "join" else token["Role"],
        "PROJECT": lambda token: token.get("FleetName") or token.get("Project") or "every",
        "DESCRIPTION": Prose("Description"),
        "CREATED (UTC)": Detail(lambda token: when(token["CreationTime"])),
        "EXPIRES (UTC)": lambda token: when(token.get("ExpirationTime")) or "never",
        "REVOKED (UTC)": Detail(lambda token: when(token.get("RevocationTime"))),
    }
    return Shown(answer, Rows(answer["Tokens"], columns, empty="No tokens."))


@command(
    app,
    asks=lambda given: (
        f"Revoke the token {given['token_id']}? Every caller that uses it loses access. You cannot undo this."
    ),
)
def revoke(
    service: Service, token_id: Annotated[str, typer.Argument(help="Id of the token, as tokens list shows it.")]
) -> Shown:
    """Revoke a token immediately. Browser sessions and open streams that use the token end, too."""
    token = service.revoke_token(TokenId=token_id)
    return Shown(token, f"{token_id} was revoked at {moment(token.get('RevocationTime'))}")

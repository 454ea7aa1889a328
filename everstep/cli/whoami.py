"""`everstep whoami`: the role, the project and the expiration time of the caller's token."""

from __future__ import annotations

import typer

from everstep.cli.commands import Service, Shown, command
from everstep.cli.output import Facts, Json, moment

app = typer.Typer(add_completion=False)


@command(app)
def whoami(service: Service) -> Shown:
    """Show the role and the project of your token, and when it expires."""
    identity: Json = service.get_caller_identity()
    return Shown(
        identity,
        Facts(
            [
                ("token", identity["TokenId"]),
                ("role", identity["Role"]),
                ("project", identity.get("Project") or "every"),
                ("description", identity["Description"] or None),
                ("created", moment(identity["CreationTime"])),
                ("expires", moment(identity.get("ExpirationTime")) or "never"),
                ("server", f"version {identity['ServerVersion']}"),
            ]
        ),
    )

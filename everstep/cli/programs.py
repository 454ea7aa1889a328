"""`everstep server`, `db`, `agent` and `aws-conformance`: start the program in place of this process.

This package must not import the control plane, the agent or the conformance run.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import typer

# The started program parses all options, --help included.
_PASS_ON: Final[dict[str, Any]] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_COMMANDS: Final = {"server": "server", "worker": "agent", "local": "aws-conformance"}
"""For each optional extra of the Python package: the command that needs it."""


def add_to(app: typer.Typer) -> None:
    """Add the commands `server`, `db`, `agent` and `aws-conformance`."""
    app.command(context_settings=_PASS_ON)(server)
    app.command(context_settings=_PASS_ON)(db)
    app.command(context_settings=_PASS_ON)(agent)
    app.command(context_settings=_PASS_ON)(aws_conformance)


def server(context: typer.Context) -> None:
    """Run a control plane (options: everstep server --help)."""
    become("control_plane", context.args, extra="server", needs=("fastapi", "sqlalchemy", "alembic", "uvicorn"))


def db(context: typer.Context) -> None:
    """Back up, restore, check or migrate the control plane's database (options: everstep db --help)."""
    become("control_plane.db_commands", context.args, extra="server", needs=("sqlalchemy", "alembic", "boto3"))


def agent(context: typer.Context) -> None:
    """Run the agent of this node (options: everstep agent --help)."""
    become("worker", context.args, extra="worker", needs=("websockets",))


def aws_conformance(context: typer.Context) -> None:
    """Check in a real AWS account what AWS's documentation leaves open (options: everstep aws-conformance --help)."""
    become("infra.aws_conformance", context.args, extra="local", needs=("moto",))


def become(module: str, arguments: Sequence[str], *, extra: str, needs: Sequence[str]) -> None:
    """Replace this process by one of Everstep's programs.

    Args:
        module: the module that `python -m` runs.
        arguments: the user's arguments, passed on unparsed.
        extra: the extra of the distribution that installs the program's dependencies.
        needs: modules that the extra installs.

    Raises:
        typer.Exit: code 2, if a needed module is not installed.
    """
    if any(importlib.util.find_spec(needed) is None for needed in (module, *needs)):
        typer.echo(
            f"`everstep {_COMMANDS[extra]}` needs more than the client: pip install 'everstep[{extra}]'",
            err=True,
        )
        raise typer.Exit(2)
    # Pass -P, because otherwise a file in the user's working directory could shadow a module.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])

"""`everstep server` and `everstep agent`: start the program in place of this process.

This package must not import the control plane or the agent.
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


def add_to(app: typer.Typer) -> None:
    """Add the commands `server` and `agent`."""
    app.command(context_settings=_PASS_ON)(server)
    app.command(context_settings=_PASS_ON)(agent)


def server(context: typer.Context) -> None:
    """Run a control plane (options: everstep server --help)."""
    become("control_plane", context.args, extra="server", needs=("fastapi", "sqlalchemy", "alembic", "uvicorn"))


def agent(context: typer.Context) -> None:
    """Run the agent of this node (options: everstep agent --help)."""
    become("worker", context.args, extra="worker", needs=("websockets",))


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
            f"`everstep {extra if extra == 'server' else 'agent'}` needs more than the client: pip install "
            f"'everstep[{extra}]'",
            err=True,
        )
        raise typer.Exit(2)
    # -P: a file in the user's working directory must not shadow a module.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])

"""`everstep server` and `everstep agent`: replaced by the program itself, because this package must not import it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

import typer

# Options, also --help, belong to the program that is run.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_to(app: typer.Typer) -> None:
    """Add both commands."""
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
        module: what `python -m` runs.
        arguments: the user's, unread.
        extra: of the distribution, that has what it needs.
        needs: modules that come with the extra.

    Raises:
        typer.Exit: code 2, when the extra is not installed.
    """
    if any(importlib.util.find_spec(needed) is None for needed in (module, *needs)):
        typer.echo(
            f"`everstep {extra if extra == 'server' else 'agent'}` needs more than the client: pip install "
            f"'everstep[{extra}]'",
            err=True,
        )
        raise typer.Exit(2)
    # -P: a file of the user's in the working directory must not shadow a module.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])

"""`everstep local …`: a complete Everstep on this machine.

Each command starts `python -P -m infra.local_cloud` and passes its options on.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any, Final

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)

# This package must not import infra, so infra.local_cloud parses all options, --help included.
_PASS_ON: Final[dict[str, Any]] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_PASS_ON)
def up(context: typer.Context) -> None:
    """Start a local AWS, a control plane and a fleet. Example: --nodes 4 --spares 1."""
    _run("up", context.args)


@app.command(context_settings=_PASS_ON)
def down(context: typer.Context) -> None:
    """Stop all processes of the local cloud. Safe to repeat."""
    _run("down", context.args)


@app.command(context_settings=_PASS_ON)
def status(context: typer.Context) -> None:
    """Show the running processes of the local cloud."""
    _run("status", context.args)


@app.command(context_settings=_PASS_ON)
def env(context: typer.Context) -> None:
    """Print shell lines that select the local cloud: eval "$(everstep local env)". --unset reverts them."""
    _run("env", context.args)


@app.command(context_settings=_PASS_ON)
def fault(context: typer.Context) -> None:
    """Inject a fault into the local cloud, such as kill-rank.

    Further commands list and clear faults, print a generated fault script (`script`), and inject the faults of a script
    at their times (`play`).
    """
    _run("fault", context.args)


def _run(command: str, arguments: list[str]) -> None:
    """Replace this process by the command line of the local cloud.

    Args:
        command: sub-command of `infra.local_cloud`, for example `up`.
        arguments: the user's arguments, passed on unparsed.

    Raises:
        typer.Exit: code 2, if the extra `local` is not installed.
    """
    if any(importlib.util.find_spec(module) is None for module in ("infra", "moto")):
        typer.echo("`everstep local` needs more than the client: pip install 'everstep[local]'", err=True)
        raise typer.Exit(2)
    # Pass -P, because otherwise a file in the user's working directory could shadow a module.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "infra.local_cloud", command, *arguments])

"""`everstep local …`: a whole Everstep on this machine.

The work is done by `python -P -m infra.local_cloud`; here its options are passed on.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)

# Options, also --help, belong to the program that is run: this package must not import it.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_PASS_ON)
def up(context: typer.Context) -> None:
    """Start a local AWS, a control plane and a fleet: --nodes 4 --spares 1."""
    _run("up", context.args)


@app.command(context_settings=_PASS_ON)
def down(context: typer.Context) -> None:
    """End everything of the local cloud; safe to repeat."""
    _run("down", context.args)


@app.command(context_settings=_PASS_ON)
def status(context: typer.Context) -> None:
    """Show what runs."""
    _run("status", context.args)


@app.command(context_settings=_PASS_ON)
def env(context: typer.Context) -> None:
    """Print shell lines that point everything at it: eval "$(everstep local env)"; --unset undoes it."""
    _run("env", context.args)


@app.command(context_settings=_PASS_ON)
def fault(context: typer.Context) -> None:
    """Let something break in the local cloud: kill-rank, partition, spot-warning …; list, clear, play, script."""
    _run("fault", context.args)


def _run(command: str, arguments: list[str]) -> None:
    """Replace this process by the local cloud's own command line.

    Args:
        command: its sub-command.
        arguments: the user's, unread.

    Raises:
        typer.Exit: code 2, when the extra that it needs is not installed.
    """
    if any(importlib.util.find_spec(module) is None for module in ("infra", "moto")):
        typer.echo("`everstep local` needs more than the client: pip install 'everstep[local]'", err=True)
        raise typer.Exit(2)
    # -P: a file of the user's in the working directory must not shadow a module.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "infra.local_cloud", command, *arguments])

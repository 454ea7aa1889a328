"""Asks the user to confirm commands that cannot be undone.

Invariant: the command runs only with `--yes`, or after a person at a terminal has agreed. Without a terminal and
without `--yes`, the command fails.
"""

from __future__ import annotations

import sys

import typer

from everstep.cli.output import say
from everstep.cli.terminal import safe_line
from everstep.errors import ConfigurationError


def confirmed(question: str, *, yes: bool) -> bool:
    """Ask the user at the terminal whether to continue.

    Args:
        question: describes the action and ends in a question mark.
        yes: whether `--yes` is set. If so, the function returns True without asking.

    Returns:
        True for the answers y and yes. For any other answer, and at the end of the input, the function prints that
        nothing was done and returns False.

    Raises:
        ConfigurationError: stdin or stderr is not a terminal, so nobody can answer.
    """
    if yes:
        return True
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigurationError(
            f"{question} The command cannot ask, because stdin is not a terminal. Nothing was changed.",
            hint="In a script, pass --yes.",
        )
    # Print the question to stderr. Python's `input` would print it to stdout, where a program may read the service's
    # answer.
    typer.echo(f"{safe_line(question)} [y/N] ", err=True, nl=False)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    say("Nothing was changed.")
    return False

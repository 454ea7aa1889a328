"""Asking before something is done that cannot be undone.

Invariant: it is done only where a person at a terminal, or `--yes`, has said so. A program that says nothing is
refused, never taken to agree.
"""

from __future__ import annotations

import sys

import typer

from everstep.cli.output import say
from everstep.cli.terminal import safe_line
from everstep.errors import ConfigurationError


def confirmed(question: str, *, yes: bool) -> bool:
    """Ask a person whether to go on.

    Args:
        question: what is about to be done, in a sentence that ends in a question mark.
        yes: `--yes` was given: nobody is asked.

    Returns:
        Whether to go on. The end of the input, and whatever is not y or yes, is a no; that nothing was done is said
        then.

    Raises:
        ConfigurationError: there is nobody to ask: stdin or stderr is no terminal.
    """
    if yes:
        return True
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigurationError(
            f"{question} There is no terminal to ask at, so nothing was done.", hint="Programs say --yes."
        )
    # To stderr, the answer read by itself: a prompt of Python's would go to stdout, into what the service answers.
    typer.echo(f"{safe_line(question)} [y/N] ", err=True, nl=False)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    say("Nothing was done.")
    return False

"""The `everstep` command: every noun under one name, and what an error looks like from outside.

Invariant: an error that is expected ends in one sentence on stderr and an exit code of the table in `output`, never in a traceback.
"""

from __future__ import annotations

import sys

import typer

from everstep.cli import (
    checkpoints,
    configure,
    doctor,
    drills,
    events,
    fleets,
    incidents,
    jobs,
    local,
    nodes,
    programs,
    protection,
    quotas,
    tokens,
    waits,
)
from everstep.cli.commands import command
from everstep.cli.output import tell
from everstep.errors import EverstepError

INTERRUPTED = 130

app = typer.Typer(
    name="everstep",
    help="Train large models on EC2 Auto Scaling groups, every optimizer step kept in cluster memory.",
    epilog="Exit codes: 0 done, 1 it did not work out, 2 wrong command or request, 130 interrupted, 254 the service refuses, 255 timed out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(jobs.app, name="jobs")
app.add_typer(protection.app, name="protection")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(incidents.app, name="incidents")
app.add_typer(events.app, name="events")
app.add_typer(fleets.app, name="fleets")
app.add_typer(nodes.app, name="nodes")
app.add_typer(drills.app, name="drills")
app.add_typer(tokens.app, name="tokens")
app.add_typer(quotas.app, name="quotas")
app.add_typer(waits.app, name="wait")
app.add_typer(local.app, name="local")
command(app)(configure.configure)
command(app)(tokens.whoami)
command(app)(doctor.doctor)
programs.add_to(app)


def main() -> None:
    """Run the command line and end the process with its exit code. The entry point of the installed script."""
    try:
        app()
    except EverstepError as error:
        sys.exit(tell(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)

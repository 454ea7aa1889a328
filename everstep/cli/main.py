"""Implements the `everstep` command: the tables of its commands, and the conversion of errors to exit codes.

A command's module is imported when the command is called. `everstep --help` imports no command's module.

Invariant: an expected error prints one sentence on stderr, never a traceback. The exit code is one of the table in
`everstep.cli.output`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from everstep import __version__
from everstep.cli import programs
from everstep.errors import EverstepError

INTERRUPTED: Final = 130

NOUNS: Final[Mapping[str, tuple[str, str]]] = {
    "jobs": ("jobs", "Training jobs."),
    "protection": ("protection", "Nodes that hold the shards of a job in memory."),
    "checkpoints": ("checkpoints", "Checkpoints of a training job in S3."),
    "incidents": ("incidents", "Failures and their recoveries."),
    "reports": ("reports", "Time, cost and incidents of jobs and fleets over a time range."),
    "events": ("events", "Events of jobs, fleets and nodes, oldest first."),
    "fleets": ("fleets", "Auto Scaling groups that Everstep manages."),
    "nodes": ("nodes", "Instances of the fleets and their use."),
    "drills": ("drills", "Inject failures into a training job on purpose and see the outcome."),
    "tokens": ("tokens", "Tokens that authorize callers of the service."),
    "quotas": ("quotas", "Limits for the jobs of each project."),
    "automation": ("automation", "Pause and resume all automatic actions of the control plane."),
    "audit": ("audit", "Calls that could change something: who, from where, and their outcome."),
    "wait": ("waits", "Wait for a condition. Exit code 1 when it can no longer occur, 255 after the time limit."),
    "local": ("local", "A complete Everstep on this machine, without an AWS account or a GPU."),
}
"""Groups of commands by name: the module of `everstep.cli` that defines the group's `app`, and the help text."""
VERBS: Final[Mapping[str, tuple[str, str]]] = {
    "configure": ("configure", "Connect this user's command line, SDK, boto3 and AWS CLI to a service."),
    "whoami": ("whoami", "Show the role and the project of your token, and when it expires."),
    "status": ("status", "Show the jobs and fleets that need a person, and what to do."),
    "doctor": (
        "doctor",
        "Check this machine, the service and AWS, and suggest a repair for each problem. Exit code 1 if any is found.",
    ),
}
"""Single commands by name: the module of `everstep.cli` that defines the command's `app`, and the help text."""


class _Imported(TyperGroup):
    """A command whose module is imported when the command is called or its help is read.

    Args:
        name: the command's name, as typed on the command line.
        module: name of the module inside `everstep.cli`.
        help: one line for the list of commands, shown without the import.
        is_group: whether the command is a noun with subcommands, even if it has only one.
    """

    def __init__(self, name: str, module: str, help: str, *, is_group: bool) -> None:
        super().__init__(name=name, help=help)
        self._module = module
        self._is_group = is_group

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Import the command's module, and return a context of the imported command."""
        return self.imported().make_context(*args, **extra)

    def list_commands(self, ctx: Any) -> list[str]:
        whole = self.imported()
        return whole.list_commands(ctx) if isinstance(whole, TyperGroup) else []

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self.imported().get_command(ctx, cmd_name)

    def imported(self) -> Any:
        """Import the module of this command, and return the typer command that the module defines."""
        build: Any = typer.main.get_group if self._is_group else typer.main.get_command
        whole = build(import_module(f"everstep.cli.{self._module}").app)
        whole.name, whole.help = self.name, self.help
        return whole


class _Everstep(TyperGroup):
    """The root of the command line, with the commands of typer and those in the tables `NOUNS` and `VERBS`."""

    def __init__(self, **settings: Any) -> None:
        programs_of_ours = settings.pop("commands")
        nouns = {name: _Imported(name, *entry, is_group=True) for name, entry in NOUNS.items()}
        verbs = {name: _Imported(name, *entry, is_group=False) for name, entry in VERBS.items()}
        super().__init__(commands={**nouns, **verbs, **programs_of_ours}, **settings)


app = typer.Typer(
    name="everstep",
    cls=_Everstep,
    help="Train large models on EC2 Auto Scaling groups, with every optimizer step kept in cluster memory.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong command or request, 3 completed with an older "
    "checkpoint, 130 interrupted, 254 refused by the service or no answer, 255 timed out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
programs.add_to(app)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from everstep.protocol.codec import PROTOCOL_VERSION

        typer.echo(f"everstep {__version__}, protocol version {PROTOCOL_VERSION}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print release and protocol version, and exit.",
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit with its exit code. Entry point of the installed script."""
    try:
        app()
    except EverstepError as error:
        from everstep.cli.output import tell  # Import here to keep `--help` fast.

        sys.exit(tell(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)

"""The `everstep` command: the table of its nouns and verbs, and how it ends.

Each entry of the table is imported when it is called. `everstep --help` imports none of them.

Invariant: an expected error prints one sentence on stderr and ends with an exit code of the table in `output`, never
with a traceback.
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
    "protection": ("protection", "Who holds what of a job right now."),
    "checkpoints": ("checkpoints", "Checkpoints of a training job in S3."),
    "incidents": ("incidents", "Failures and their recoveries."),
    "events": ("events", "What happened, in order."),
    "fleets": ("fleets", "Auto Scaling groups that Everstep keeps."),
    "nodes": ("nodes", "Instances of the fleets, and what each is used for."),
    "drills": ("drills", "Break something of a training job on purpose, and see what became of it."),
    "tokens": ("tokens", "Who may call the service, and as what."),
    "quotas": ("quotas", "What the jobs of each project may have."),
    "wait": ("waits", "Wait for a condition. Exit code 1 when it can no longer occur, 255 after the time limit."),
    "local": ("local", "A whole Everstep on this machine: no AWS account, no GPU."),
}
"""Groups of commands by name: the module of `everstep.cli` whose `app` has them, and the help text."""
VERBS: Final[Mapping[str, tuple[str, str]]] = {
    "configure": ("configure", "Connect this user's command line, SDK, boto3 and AWS CLI to a service."),
    "whoami": ("whoami", "Show the role and the project of your token, and when it expires."),
    "doctor": (
        "doctor",
        "Check this machine, the service and AWS, and say how to fix what is wrong. Exit code 1 if anything is.",
    ),
}
"""Single commands, likewise."""


class _Imported(TyperGroup):
    """A command whose module is imported when the command is called or its own help is read.

    Args:
        name: of the command.
        module: of `everstep.cli`, without the package's name.
        help: the command's help text.
        is_group: a noun with commands of its own, also where it has only one.
    """

    def __init__(self, name: str, module: str, help: str, *, is_group: bool) -> None:
        super().__init__(name=name, help=help)
        self._module = module
        self._is_group = is_group

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Return a context of the imported command."""
        return self.imported().make_context(*args, **extra)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the imported command's subcommands."""
        whole = self.imported()
        return whole.list_commands(ctx) if isinstance(whole, TyperGroup) else []

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return one subcommand of the imported command."""
        return self.imported().get_command(ctx, cmd_name)

    def imported(self) -> Any:
        """Import the command's module and return the command itself."""
        build: Any = typer.main.get_group if self._is_group else typer.main.get_command
        whole = build(import_module(f"everstep.cli.{self._module}").app)
        whole.name, whole.help = self.name, self.help
        return whole


class _Everstep(TyperGroup):
    """The top of the command line: the programs that typer registered, and the table above."""

    def __init__(self, **settings: Any) -> None:
        programs_of_ours = settings.pop("commands")
        nouns = {name: _Imported(name, *entry, is_group=True) for name, entry in NOUNS.items()}
        verbs = {name: _Imported(name, *entry, is_group=False) for name, entry in VERBS.items()}
        super().__init__(commands={**nouns, **verbs, **programs_of_ours}, **settings)


app = typer.Typer(
    name="everstep",
    cls=_Everstep,
    help="Train large models on EC2 Auto Scaling groups, every optimizer step kept in cluster memory.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong command or request, 130 interrupted, 254 refused by the "
    "service, 255 timed out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
programs.add_to(app)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"everstep {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and end the process with its exit code. The entry point of the installed script."""
    try:
        app()
    except EverstepError as error:
        from everstep.cli.output import tell  # --help does not need rich's tables

        sys.exit(tell(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)

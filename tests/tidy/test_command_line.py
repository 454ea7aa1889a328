"""The command line keeps the flags that users' scripts rely on. `flags.txt` beside this file lists them.

python -m tests.tidy.test_command_line      writes flags.txt again; check the difference before you commit it
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from everstep.cli.main import app, main
from infra.local_cloud.__main__ import app as local_cloud

SNAPSHOT = Path(__file__).with_name("flags.txt")


def subcommands(command) -> dict:
    """Return the subcommands of a command by name, also those that are imported on call."""
    names = command.list_commands(None) if hasattr(command, "list_commands") else []
    return {name: command.get_command(None, name) for name in names}


def lines(command, path: str) -> Iterator[str]:
    if hasattr(command, "imported"):
        command = command.imported()
    for name, inner in sorted(subcommands(command).items()):
        yield from lines(inner, f"{path} {name}")
    if not subcommands(command):
        options = sorted("/".join(parameter.opts) for parameter in command.params if parameter.opts[0].startswith("-"))
        arguments = [parameter.name.upper() for parameter in command.params if not parameter.opts[0].startswith("-")]
        yield " ".join([path, *arguments, *options])


def described() -> str:
    return "\n".join(lines(typer.main.get_command(app), "everstep")) + "\n"


def test_flags_are_what_was_promised():
    assert described() == SNAPSHOT.read_text(), "run python -m tests.tidy.test_command_line if the change is meant"


def test_every_option_and_command_has_a_help_text():
    def unhelpful(command, path: str) -> Iterator[str]:
        if not (command.help or "").strip():
            yield path
        for parameter in getattr(command, "imported", lambda: command)().params:
            if parameter.opts[0] != "--help" and not getattr(parameter, "help", None):
                yield f"{path} {parameter.opts[0]}"
        for name, inner in subcommands(command).items():
            yield from unhelpful(inner, f"{path} {name}")

    assert list(unhelpful(typer.main.get_command(app), "everstep")) == []


@pytest.mark.parametrize("whose", [app, local_cloud])
def test_no_help_text_has_words_that_rich_takes_for_markup_and_leaves_out(whose):
    def lost(command, path: str) -> Iterator[str]:
        for text in (command.help, *(getattr(parameter, "help", None) for parameter in command.params)):
            if text and re.search(r"(?<!\\)\[[a-z/]", text):
                yield f"{path}: {text}"
        for name, inner in subcommands(command).items():
            yield from lost(inner, f"{path} {name}")

    assert list(lost(typer.main.get_command(whose), "everstep")) == []


def test_the_client_and_the_command_line_need_the_base_install_alone():
    heavy = (
        "torch",
        "deepspeed",
        "numpy",
        "fastapi",
        "sqlalchemy",
        "moto",
        "pydantic",
        "control_plane",
        "worker",
        "infra",
    )
    code = (
        "import sys, everstep, everstep.sdk, everstep.failures, everstep.cli.main; print([name for name in "
        f"{heavy!r} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_help_comes_at_once():
    """`--help` is fast, because it imports neither the modules of the commands nor heavy libraries."""
    heavy = (
        "boto3",
        "botocore",
        "urllib3",
        "jmespath",
        "yaml",
        "msgspec",
        "asyncio",
        "everstep.sdk",
        "everstep.training",
        "everstep.cli.commands",
    )
    code = f"import sys, everstep.cli.main; print([name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


if __name__ == "__main__":
    SNAPSHOT.write_text(described())


@pytest.mark.parametrize("words", [("jobs", "submit"), ("jobs", "list"), ("fleets", "create")])
def test_help_fits_80_columns_and_names_each_option_whole(monkeypatch, capsys, words):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["everstep", *words, "--help"])
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    command = typer.main.get_command(app).get_command(None, words[0]).imported().get_command(None, words[1])
    assert [option for each in command.params for option in each.opts if option not in out] == []


def test_the_help_of_submit_begins_with_the_usual_options(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["everstep", "jobs", "submit", "--help"])
    with pytest.raises(SystemExit):
        main()
    usual = capsys.readouterr().out.partition("Options for ")[0]
    names = ["--name", "--source-dir", "--entry-point", "--node-count", "--ranks-per-node", "--hyperparameter"]
    names += ["--input", "--requirements", "--fleet", "--dry-run"]
    assert [name for name in names if name not in usual] == []
    assert "--max-attempts" not in usual

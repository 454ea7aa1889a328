"""The command blocks of docs/aws.md: the tests that run them, and the blocks that need AWS itself.

The test of a section runs all blocks of the section in order, except the blocks in `EXCEPTIONS`. A new block is
therefore executed as soon as it is on the page.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "aws.md"
BEGIN, SMALL, LARGE, QUESTIONS = (
    "Before you begin",
    "A small installation",
    "An installation for production",
    "Ask a real account",
)

TESTS: Mapping[str, str] = {
    BEGIN: "production/test_aws_page.py::test_the_commands_before_both_installations_run",
    SMALL: "production/test_aws_page.py::test_the_small_installation_runs_a_job_and_ends",
    LARGE: "production/test_aws_page.py::test_the_installation_for_production_has_a_fleet_and_ends",
    QUESTIONS: "contract/test_aws_conformance.py::test_the_command_prints_the_lines_of_the_page_and_asks",
}
"""The test that runs the blocks of a section, by the section's heading."""

EXCEPTIONS: Mapping[str, str] = {
    "packer build": "Packer logs in through Session Manager. The local cloud has no Systems Manager agent.",
}
"""The reason why no test runs a block, by a command that the block contains."""
UNCONNECTED = """
aws() {
  if [ "$1 $2" = "ssm start-session" ]; then
    printf '%s\\n' "$*"
    set -- "$@" --generate-cli-skeleton output
  fi
  command aws "$@"
}
"""
"""Shell function that replaces `aws ssm start-session`: it prints the arguments, and the AWS CLI only checks them.

A real session would forward a port to a Systems Manager agent, which instances of the local cloud do not have.
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of docs/aws.md."""

    section: str
    """The nearest heading above the block."""
    language: str
    text: str

    @property
    def is_for_second_terminal(self) -> bool:
        """Whether the reader leaves the commands running in a second terminal."""
        return "aws ssm start-session" in self.text

    @property
    def exceptions(self) -> list[str]:
        """The keys of `EXCEPTIONS` that the block contains."""
        return [command for command in EXCEPTIONS if command in self.text]


def blocks() -> list[Block]:
    """Return all fenced blocks of docs/aws.md in order."""
    found, section = list[Block](), ""
    for heading, language, text in re.findall(
        r"^#+ ([^\n]+)$|^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    ):
        section = heading or section
        if not heading:
            found.append(Block(section, language, text))
    return found


def blocks_to_run(section: str) -> list[Block]:
    """Return the blocks of a section that its test runs."""
    return [block for block in blocks() if block.section == section and not block.exceptions]


@dataclass(frozen=True)
class Terminal:
    """A terminal in which a reader enters the blocks of docs/aws.md.

    Working directory, variables and functions persist from block to block.
    """

    directory: Path
    """Working directory of the first block."""
    state: Path
    """Shell script that restores the terminal's directory, variables and functions before the next block."""
    environment: Mapping[str, str]

    def run(self, text: str) -> str:
        """Run a block in bash, and return its output."""
        state = self.state
        if not state.exists():
            state.write_text(f"cd '{self.directory}'\n{UNCONNECTED}")
        script = f'. "{state}"\n{text}\n{{ export -p; declare -f; echo "cd \'$PWD\'"; }} >"{state}" || exit 1\n'
        done = subprocess.run(
            ["bash", "--norc", "-euo", "pipefail", "-c", script],
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
        return done.stdout

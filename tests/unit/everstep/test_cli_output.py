"""Tests what all commands have in common: `--output`, `--query`, connection options, waiting and completion."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from datetime import UTC, datetime

import pytest
import yaml
from botocore.exceptions import WaiterError
from rich.console import Console

from everstep import failures, sdk
from everstep.cli import main as cli
from everstep.cli import output
from everstep.cli.formats import OutputFormat, headings_and_cells, plain, rendered
from everstep.cli.output import to_do
from everstep.cli.progress import Progress
from everstep.errors import ServiceFailed, WaitFailed, WaitTimedOut
from tests.unit.everstep.conftest import Client
from tests.unit.everstep.test_sdk import Wire

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
FLEETS = {
    "Fleets": [
        {"FleetName": "main", "SpareCount": 1, "CreationTime": AT, "Drift": [], "Tags": {"team": "x"}},
        {"FleetName": "other", "SpareCount": 2, "CreationTime": AT, "Drift": ["a", "b"], "Tags": {}},
    ],
    "ResponseMetadata": {"RequestId": "r"},
}
PLAIN = plain(FLEETS)


def test_json_is_the_services_answer_unchanged():
    assert json.loads(rendered(PLAIN, OutputFormat.JSON)) == PLAIN
    assert PLAIN["Fleets"][0]["CreationTime"] == "2026-03-01T12:00:00Z"
    assert "ResponseMetadata" not in PLAIN
    assert "\n" not in rendered(PLAIN, OutputFormat.JSON, is_one_of_many=True)


def test_yaml_says_the_same_and_several_can_be_read_one_after_the_other():
    assert yaml.safe_load(rendered(PLAIN, OutputFormat.YAML)) == PLAIN
    many = "\n".join(rendered(each, OutputFormat.YAML, is_one_of_many=True) for each in (PLAIN, {"a": 1}))
    assert list(yaml.safe_load_all(many)) == [PLAIN, {"a": 1}]
    assert rendered("main", OutputFormat.YAML) == "main"


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        ("main", ["main"]),
        (None, ["None"]),
        ([], []),
        (["a", 1, True], ["a\t1\tTrue"]),
        ([["a", 1], ["b", None]], ["a\t1", "b\tNone"]),
        ({"B": 1, "A": "x", "C": {"D": 2}, "E": ["u", "v"]}, ["x\t1", "C\t2", "E\tu", "E\tv"]),
        ({"Rows": [{"A": 1, "B": 2}, {"A": 3}]}, ["ROWS\t1\t2", "ROWS\t3\t"]),
    ],
)
def test_text_is_what_the_aws_cli_makes_of_it(value, lines):
    assert rendered(value, OutputFormat.TEXT).splitlines() == lines


def test_text_of_the_aws_cli_itself():
    """The output of `--output text` equals that of the AWS CLI's own formatter."""
    from io import StringIO

    from awscli.text import format_text

    for value in (
        PLAIN,
        PLAIN["Fleets"],
        {"A": [[1, 2], [3]], "B": {"C": {"D": None}}},
        [{"A": {"B": [1]}}, {"A": {"B": []}, "C": 1}],
        ["a", ["b"]],
    ):
        theirs = StringIO()
        format_text(value, theirs)
        assert rendered(value, OutputFormat.TEXT) == theirs.getvalue().removesuffix("\n")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("main", ([], [["main"]])),
        (None, ([], [])),
        (["a", "b"], ([], [["a"], ["b"]])),
        ([["a", 1], ["b", 2]], ([], [["a", "1"], ["b", "2"]])),
        ({"A": 1, "B": ["x"]}, ([], [["A", "1"], ["B", '["x"]']])),
        ([{"A": 1}, {"A": 2, "B": None}], (["A", "B"], [["1", ""], ["2", "None"]])),
    ],
)
def test_what_a_query_finds_is_a_table(value, expected):
    assert headings_and_cells(value) == expected


@pytest.mark.parametrize(
    ("options", "out"),
    [
        (("--query", "Fleets[].FleetName", "--output", "text"), "main\tother\n"),
        (("--query", "Fleets[?SpareCount > `1`].FleetName | [0]", "-o", "json"), '"other"\n'),
        (("--query", "Fleets[0].Tags", "-o", "yaml"), "team: x\n"),
        (
            ("--query", "Fleets[].{Name: FleetName, Spares: SpareCount}"),
            "Name   Spares\nmain   1     \nother  2     \n",
        ),
        (("--query", "Nothing", "-o", "text"), "None\n"),
    ],
)
def test_a_query_shows_what_was_asked_for(run, options, out):
    code, shown, err, _ = run("fleets", "list", *options, list_fleets=FLEETS)
    assert (code, shown, err) == (0, out, "")


def test_a_query_that_is_wrong_is_refused_before_anything_is_asked(run):
    code, out, err, calls = run("fleets", "delete", "main", "--query", "Fleets[", delete_fleet={})
    assert (code, out, calls) == (2, "", [])
    assert err.startswith("error: --query 'Fleets[':")
    code, _, err, _ = run("fleets", "list", "--query", "length(Nothing)", list_fleets=FLEETS)
    assert code == 2
    assert "In function length()" in err


def test_every_command_that_asks_the_service_takes_the_same_options(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(sdk, "client", lambda **options: asked.append(options) or Client({"list_fleets": FLEETS}))
    words = ["--profile", "staging", "--endpoint-url", "https://x.example", "--region", "eu-west-1", "-o", "json"]
    monkeypatch.setattr(sys, "argv", ["everstep", "fleets", "list", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    assert asked == [{"profile_name": "staging", "endpoint_url": "https://x.example", "region_name": "eu-west-1"}]


def test_colors_are_only_for_who_wants_them(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.colored("r0", "red") == "r0"
    monkeypatch.delenv("NO_COLOR")
    assert output.colored("r0", "red") == "\x1b[31mr0\x1b[0m"


def test_logs_can_be_queried_line_by_line(run):
    line = {"Timestamp": AT, "Generation": 1, "Rank": 0, "Stream": "stdout", "Message": "loss 1"}
    pages = {
        "get_log_events": lambda **given: {
            "Events": [] if "NextToken" in given else [line, line],
            "NextForwardToken": "1",
        }
    }
    _, out, _, _ = run("jobs", "logs", "gpt", "--grep", "loss", "-o", "json", **pages)
    assert [json.loads(each)["Message"] for each in out.splitlines()] == ["loss 1", "loss 1"]
    _, out, _, _ = run("jobs", "logs", "gpt", "--grep", "loss", "--query", "[Rank, Message]", "-o", "text", **pages)
    assert out == "0\tloss 1\n" * 2


# Tests of commands that wait


class Waiter:
    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.asked: dict = {}

    def wait(self, **asked: object) -> None:
        self.asked = asked
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("reason", "last", "code", "words"),
    [
        (
            "Max attempts exceeded. Previously accepted state: …",
            {"SecondaryStatus": "Starting", "Reason": "2 of 4 nodes."},
            255,
            "It is Starting. 2 of",
        ),
        (
            "Waiter encountered a terminal failure state: …",
            {"FleetStatus": "Frozen"},
            1,
            "can no longer be met. It is Frozen.",
        ),
        (
            "An error occurred",
            {"Error": {"Code": "ResourceNotFoundException", "Message": "none"}},
            254,
            "none (ResourceNotFoundException)",
        ),
    ],
)
def test_a_wait_that_fails_says_how_and_ends_as_the_aws_cli_does(run, reason, last, code, words):
    waiter = Waiter(WaiterError(name="TrainingJobRunning", reason=reason, last_response=last))
    ended, out, err, _ = _wait(run, waiter)
    assert (ended, out) == (code, "")
    assert words in err
    assert waiter.asked == {"TrainingJobName": "gpt", "WaiterConfig": {"Delay": 1, "MaxAttempts": 2}}


def _wait(run, waiter: Waiter):
    return run(
        "wait", "job-running", "gpt", "--delay", "1", "--max-attempts", "2", waiter=waiter, describe_training_job={}
    )


def test_a_wait_that_is_over_shows_what_is_so(run):
    code, out, _, _ = _wait(run, Waiter(None))
    assert (code, out) == (0, "gpt: running\n")


def look(status: str, reason: str, **changes: object) -> dict:
    job = {
        "TrainingJobName": "gpt",
        "TrainingJobStatus": "InProgress",
        "SecondaryStatus": status,
        "Reason": reason,
        "IncidentCount": 0,
    }
    return {**job, "Boundary": -1, "CommittedStep": -1, "Generation": 1, **changes}


def test_a_waiter_shows_why_a_job_is_still_starting(monkeypatch, capsys):
    python, first = "running the script up to everstep.training.init on i-1 (10 s)", "making the first step on i-1"
    looks = [
        look("Starting", python),
        look("Starting", python),
        look("Starting", first),
        look("Training", "trains from step 0", Boundary=1),
    ]
    client = Wire(monkeypatch, *looks).client()
    monkeypatch.setattr(sdk, "client", lambda **_: client)
    monkeypatch.setattr(sys, "argv", ["everstep", "wait", "job-running", "gpt"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code or 0, out) == (0, "gpt: running\n")
    assert err.splitlines() == [
        f"gpt: Starting: {python}",
        f"gpt: Starting: {first}",
        "gpt: Training, step 1, committed -, generation 1; trains from step 0",
    ]


def test_a_suspected_hang_is_told_while_somebody_waits_and_not_at_each_look():
    said = io.StringIO()
    progress = Progress(
        None, "gpt", console=Console(file=said, width=200), monotonic=iter([100.0, 101.0, 102.0, 112.0]).__next__
    )
    progress.show(look("Training", "trains from step 0", Boundary=9, CommittedStep=8))
    for age in (31, 32, 42):
        progress.show(
            look(
                "Training",
                f"no progress for {age} s (limit 90 s): rank 0 on i-1 stood still",
                Boundary=9,
                CommittedStep=8,
            )
        )
    line = "gpt: Training, step 9, committed 8, generation 1"
    hang = "; no progress for 42 s (limit 90 s): rank 0 on i-1 stood still"
    assert said.getvalue().splitlines() == [f"{line}; trains from step 0", line + hang]


def test_each_line_is_told_once_and_the_end_by_the_command_that_waits():
    said = io.StringIO()
    progress = Progress(None, "gpt", console=Console(file=said, width=200), monotonic=itertools.count(0, 20).__next__)
    for _ in range(3):
        progress.show(look("Pending", "place 2 of 2 in the queue"))
    progress.show({**look("Failed", "rank 0 failed"), "TrainingJobStatus": "Failed"})
    assert said.getvalue() == "gpt: Pending: place 2 of 2 in the queue\n"


def test_waiting_is_translated_for_other_programs_too():
    for reason, kind in (("Max attempts exceeded", WaitTimedOut), ("terminal failure state", WaitFailed)):
        with pytest.raises(kind), failures.translated():
            raise WaiterError(name="FleetReady", reason=reason, last_response={})


# Tests of shell completion


COMPLETE = """
import json, os, sys
from everstep.cli.main import main
sys.argv = ["everstep"]
for words, environment in json.load(sys.stdin):
    os.environ |= {**environment, "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    try:
        main()
    except SystemExit:
        print("--", flush=True)
"""


def completed(*asked: tuple[str, dict[str, str]]) -> list[list[str]]:
    """Return bash's completions of several command lines.

    A single process computes all completions, because the start of a process takes seconds on a busy machine.
    """
    keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    told = subprocess.run(
        [sys.executable, "-P", "-c", COMPLETE],
        env={**keep, "_EVERSTEP_COMPLETE": "complete_bash"},
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert told.stderr == ""
    return [part.split() for part in told.stdout.split("--\n")[:-1]]


def test_a_shell_completes_commands_and_options_and_a_silent_service_offers_nothing():
    nobody = {"EVERSTEP_ENDPOINT_URL": "http://127.0.0.1:9", "EVERSTEP_TOKEN": "t"}
    words = ("everstep job", "everstep jobs des", "everstep jobs list --st")
    nouns, verbs, options, names = completed(*((each, {}) for each in words), ("everstep jobs describe g", nobody))
    assert (nouns, verbs, names) == (["jobs"], ["describe"], [])
    assert "--starting-token" in options


def test_a_shell_completes_names(monkeypatch):
    from everstep.cli import names

    jobs = {
        "TrainingJobSummaries": [{"TrainingJobName": "gpt"}, {"TrainingJobName": "gpt-2"}, {"TrainingJobName": "bert"}]
    }
    asked = []
    monkeypatch.setattr(
        sdk, "client", lambda **options: asked.append(options) or Client({"list_training_jobs": lambda: jobs})
    )
    context = type("Context", (), {"params": {"profile": "staging", "endpoint_url": None}})()
    assert names.offer_jobs(context, "gp") == ["gpt", "gpt-2"]
    assert asked == [{"endpoint_url": None, "profile_name": "staging", "config": sdk.IMPATIENT}]
    monkeypatch.setattr(
        sdk, "client", lambda **_: Client({"list_training_jobs": ServiceFailed("No.", code="AccessDeniedException")})
    )
    assert names.offer_jobs(context, "gp") == []


def test_what_users_wrote_is_shown_as_they_wrote_it(capsys):
    written = r"stop=\[/INST\] \[err] [bold]x[/] :smile:"
    output.show(output.Facts([("x", written)]))
    output.tell(ServiceFailed(written))
    out, err = capsys.readouterr()
    assert written in out
    assert f"error: {written}" in err


def test_an_action_is_its_description_followed_by_its_commands() -> None:
    action = {"Description": "Inspect node i-1.", "Command": "look", "FurtherCommands": ["terminate", "release"]}
    assert to_do(action) == "Inspect node i-1.\n    look\n    terminate\n    release"
    assert to_do({"Description": "Resume the job.", "Command": "resume"}) == "Resume the job.\n    resume"

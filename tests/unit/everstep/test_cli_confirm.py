"""Irreversible commands ask for confirmation and run only after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
import typer

from everstep.cli.main import app
from tests.tidy.test_command_line import subcommands

DRILL = {"DrillId": "drill-1", "DrillType": "kill-rank", "NodeId": "i-1"}
NODE = {"NodeId": "i-1", "NodeStatus": "held"}
GONE = {
    "GenerationCount": 1,
    "CheckpointCount": 0,
    "IncidentCount": 0,
    "ObjectCount": 0,
    "ObjectBytes": 0,
    "HasMoreObjects": False,
    "S3Uris": [],
}
FLEET = {
    **dict.fromkeys(
        ("FleetName", "FleetStatus", "Reason", "AutoScalingGroupName", "InstanceType", "AvailabilityZone", "Project"),
        "x",
    ),
    **dict.fromkeys(
        ("ConnectedNodeCount", "NodeCount", "DesiredNodeCount", "MaxNodeCount", "MinNodeCount", "SpareCount"), 1
    ),
    **{
        "MaxReplacementsPerHour": 1,
        "HoldFailedInstances": False,
        "ReplicaEncryption": "Auto",
        "EncryptsReplicas": False,
        "Drift": [],
        "CreationTime": None,
        "AccountingSeconds": {},
        "IncidentCount": 0,
    },
    **{"Reliability": {"LostSteps": 0}, "NodeSeconds": 0.0},
}
ASKING = {
    ("jobs", "delete", "gpt"): ("delete_training_job", GONE, "Delete the training job gpt permanently?"),
    ("jobs", "delete", "gpt", "--delete-objects"): ("delete_training_job", GONE, "with all that it has in S3"),
    ("fleets", "delete", "main"): ("delete_fleet", FLEET, "Delete the fleet main and terminate all its instances?"),
    ("automation", "pause", "--reason", "x"): (
        "pause_automation",
        {"IsPaused": True, "Reason": "x", "PausedBy": "ada", "PauseTime": None},
        "Pause all automatic actions?",
    ),
    ("fleets", "roll", "main"): (
        "start_fleet_roll",
        FLEET,
        "Replace all nodes of main, with at most 1 out of service?",
    ),
    ("fleets", "unfreeze", "main"): ("unfreeze_fleet", FLEET, "silent nodes of main"),
    ("checkpoints", "delete", "gpt", "8"): (
        "delete_checkpoint",
        {"Step": 8, "Generation": 1, "Status": "Trashed", "PurgeTime": datetime(2026, 3, 2, tzinfo=UTC)},
        "step 8 of gpt after its time in the trash?",
    ),
    ("checkpoints", "delete", "gpt", "8", "--skip-trash"): (
        "delete_checkpoint",
        {"Step": 8, "Generation": 1, "Status": "Deleted"},
        "step 8 of gpt from S3, for good?",
    ),
    ("nodes", "replace", "i-1"): ("replace_node", NODE, "Terminate the instance i-1"),
    ("nodes", "reboot", "i-1"): ("reboot_node", NODE, "Reboot i-1?"),
    ("nodes", "release", "i-1", "--terminate"): ("release_node", NODE, "Terminate the instance i-1?"),
    ("nodes", "reset-session", "i-1"): ("reset_node_session", NODE, "Revoke the session of i-1"),
    ("tokens", "revoke", "tok-1"): ("revoke_token", {"TokenId": "tok-1"}, "Revoke the token tok-1"),
    ("drills", "start", "kill-rank", "--job", "gpt"): (
        "start_drill",
        DRILL,
        "Inject kill-rank into gpt?",
    ),
}
ASKING_AFTER_A_LOOK = {("fleets", "create")}
"""Commands that ask for confirmation only if the service reports that they would change something."""
every_one_that_asks = pytest.mark.parametrize("words", ASKING, ids=" ".join)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Callable[[str], None]]]:
    """Open a terminal, and yield a function that types a text on it, as a person does.

    The function returns a second function, which waits until a given text appears on the terminal.
    """
    ours, theirs = os.openpty()
    with open(theirs) as reader, open(os.dup(theirs), "w", buffering=1) as writer:

        def types(text: str) -> Callable[[str], None]:
            monkeypatch.setattr(sys, "stdin", reader)
            monkeypatch.setattr(sys, "stderr", writer)
            os.write(ours, text.encode())
            return see

        def see(words: str) -> None:
            seen = b""
            while words not in seen.decode(errors="ignore").replace("\r\n", ""):
                seen += os.read(ours, 65_536)  # a single read may return only the echo of the typed text, so read again

        yield types
    os.close(ours)


def test_these_ask_and_no_others() -> None:
    def with_yes(command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name, inner in subcommands(command).items():
            yield from with_yes(inner, (*path, name))
        if any("--yes" in parameter.opts for parameter in command.params):
            yield path

    assert set(with_yes(typer.main.get_command(app), ())) == {words[:2] for words in ASKING} | ASKING_AFTER_A_LOOK


@every_one_that_asks
def test_a_program_that_says_nothing_is_refused_before_anything_is_asked_of_the_service(run, words) -> None:
    operation, answer, question = ASKING[words]
    code, out, err, calls = run(*words, **{operation: answer})
    assert (code, out, calls) == (2, "", [])
    assert question in err
    assert "hint: In a script, pass --yes." in err


@every_one_that_asks
def test_a_program_says_yes(run, words) -> None:
    operation, answer, question = ASKING[words]
    for yes in ("--yes", "-y"):
        code, _, err, calls = run(*words, yes, **{operation: answer})
        assert (code, [name for name, _ in calls]) == (0, [operation])
        assert question not in err


@every_one_that_asks
def test_a_person_is_asked(run, terminal, words) -> None:
    operation, answer, question = ASKING[words]
    seen = terminal("y\n")
    code, out, _, calls = run(*words, "-o", "json", **{operation: answer})
    assert (code, [name for name, _ in calls]) == (0, [operation])
    assert out.startswith("{"), "the question is not in the answer"
    seen(question)


@pytest.mark.parametrize("said", ["n\n", "\n", "delete it\n", "\x04"])
def test_whoever_does_not_say_yes_says_no(run, terminal, said: str) -> None:
    seen = terminal(said)
    code, out, _, calls = run("jobs", "delete", "gpt", delete_training_job=GONE)
    assert (code, out, calls) == (1, "", [])
    seen("Nothing was changed.")


def test_what_takes_nothing_away_does_not_ask(run) -> None:
    code, _, _, calls = run("jobs", "delete", "gpt", "--dry-run", delete_training_job=GONE)
    assert (code, calls[0][1]["DryRun"]) == (0, True)
    code, _, _, calls = run("nodes", "release", "i-1", release_node={**NODE, "NodeStatus": "spare"})
    assert (code, len(calls)) == (0, 1)


def test_a_person_who_does_not_see_the_question_is_not_asked(run, terminal, monkeypatch, capsys) -> None:
    stderr = sys.stderr
    terminal("y\n")
    monkeypatch.setattr(sys, "stderr", stderr)
    code, _, err, calls = run("jobs", "delete", "gpt", delete_training_job=GONE)
    assert (code, calls) == (2, [])
    assert "stdin is not a terminal" in err

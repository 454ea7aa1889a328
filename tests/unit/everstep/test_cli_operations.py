"""Tests commands for tokens, node operations, takeovers and drills, as a person types them."""

from __future__ import annotations

import io
import sys
from datetime import UTC, datetime

import pytest

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
TOKEN = {
    "TokenId": "tok-1",
    "Kind": "user",
    "Role": "viewer",
    "Project": "speech",
    "Description": "ci",
    "CreationTime": AT,
}
NODE = {"NodeId": "i-1", "NodeStatus": "assigned", "Request": "drain", "TrainingJobName": "gpt"}


def test_a_new_token_is_alone_on_stdout(run) -> None:
    options = ("--role", "viewer", "--project", "speech", "--description", "ci", "--expires-in-seconds", "60")
    code, out, err, calls = run("tokens", "create", *options, create_token={"Secret": "est_x", "Token": TOKEN})
    assert (code, out) == (0, "est_x\n")
    assert "tok-1" in err
    assert calls == [
        ("create_token", {"Role": "viewer", "Description": "ci", "Project": "speech", "ExpiresInSeconds": 60})
    ]


def test_tokens_are_listed_and_revoked(run) -> None:
    join = {
        "TokenId": "tok-2",
        "Kind": "join",
        "Role": "agent",
        "FleetName": "main",
        "Description": "",
        "CreationTime": AT,
        "ExpirationTime": AT,
    }
    code, out, _, _ = run("tokens", "list", "--ended", list_tokens={"Tokens": [TOKEN, join]})
    assert code == 0
    first, second = out.splitlines()[1:]
    assert all(word in first for word in ("tok-1", "viewer", "speech", "never"))
    assert all(word in second for word in ("tok-2", "join", "main", "2026-03-01 12:00:00"))
    code, out, _, _ = run("tokens", "revoke", "tok-1", "--yes", revoke_token={**TOKEN, "RevocationTime": AT})
    assert (code, out) == (0, "tok-1 was revoked at 2026-03-01 12:00:00 UTC\n")


def test_who_am_i(run) -> None:
    identity = {**TOKEN, "ServerVersion": "0.1.0", "ServerTime": AT}
    code, out, _, _ = run("whoami", get_caller_identity=identity)
    assert code == 0
    assert all(word in out for word in ("viewer", "speech", "never", "0.1.0"))


@pytest.mark.parametrize("verb", ["drain", "replace", "reboot", "hold"])
def test_what_is_asked_of_a_node_is_said_with_what_comes_first(run, verb: str) -> None:
    yes = ("--yes",) if verb in ("replace", "reboot") else ()
    code, out, _, calls = run(
        "nodes", verb, "i-1", "--reason", "why", *yes, **{f"{verb}_node": {**NODE, "Request": verb}}
    )
    assert (code, out) == (0, f"requested for i-1: {verb}; gpt moves to another node first\n")
    assert calls == [(f"{verb}_node", {"NodeId": "i-1", "Reason": "why"})]


def test_a_session_is_reset_once_that_is_confirmed(run) -> None:
    code, out, _, calls = run("nodes", "reset-session", "i-1", "--reason", "new disk", "--yes", reset_node_session=NODE)
    assert (code, out) == (0, "the session of i-1 is revoked; the node may join once more\n")
    assert calls == [("reset_node_session", {"NodeId": "i-1", "Reason": "new disk"})]


def test_a_request_that_is_called_off(run) -> None:
    _, out, _, _ = run("nodes", "release", "i-1", release_node={"NodeId": "i-1", "NodeStatus": "assigned"})
    assert out == "i-1 is assigned; it has no pending request\n"


def test_an_incident_is_seen(run) -> None:
    seen = {"IncidentId": "inc-1", "AcknowledgementTime": AT, "AcknowledgedBy": "ann", "Acknowledgement": "the switch"}
    code, out, _, calls = run("incidents", "ack", "inc-1", "--note", "the switch", acknowledge_incident=seen)
    assert (code, out) == (0, "inc-1 was seen: 2026-03-01 12:00:00 UTC by ann: the switch\n")
    assert calls == [("acknowledge_incident", {"IncidentId": "inc-1", "Note": "the switch"})]


def test_an_incident_gets_an_owner_and_a_note(run) -> None:
    owned = {"IncidentId": "inc-1", "Owner": "ann"}
    code, out, _, calls = run("incidents", "update", "inc-1", "--owner", "ann", update_incident=owned)
    assert (code, out) == (0, "owner of inc-1: ann\n")
    assert calls == [("update_incident", {"IncidentId": "inc-1", "Owner": "ann"})]
    _, out, _, calls = run("incidents", "update", "inc-1", "--owner", "", update_incident={"IncidentId": "inc-1"})
    assert (out, calls[0][1]["Owner"]) == ("owner of inc-1: nobody\n", "")
    _, out, _, calls = run("incidents", "note", "inc-1", "the switch", create_incident_note={"NoteId": 7})
    assert (out, calls) == (
        "note 7 was added to inc-1\n",
        [("create_incident_note", {"IncidentId": "inc-1", "Text": "the switch"})],
    )


def test_a_job_gets_notes(run) -> None:
    _, out, _, calls = run("jobs", "note", "gpt", "a baseline", create_training_job_note={"NoteId": 8})
    assert (out, calls[0][1]) == ("note 8 was added to gpt\n", {"TrainingJobName": "gpt", "Text": "a baseline"})
    note = {"NoteId": 8, "Author": "ann", "CreationTime": AT, "Text": "a baseline"}
    _, out, _, _ = run("jobs", "notes", "gpt", list_training_job_notes={"Notes": [note]})
    assert out.splitlines()[1].split() == ["2026-03-01", "12:00:00", "ann", "a", "baseline"]


def test_similar_incidents_are_listed_with_what_they_share(run) -> None:
    row = {"IncidentId": "inc-2", "TrainingJobName": "gpt", "OpenedAt": AT, "Outcome": "Recovered", "LostSteps": 2}
    rows = [{**row, "Likeness": ["Instance", "Fleet"]}, {**row, "IncidentId": "inc-3", "Likeness": []}]
    _, out, _, calls = run("incidents", "similar", "inc-1", list_similar_incidents={"Incidents": rows})
    first, second = out.splitlines()[1:]
    assert "Instance, Fleet" in first
    assert "Cause" in second
    assert calls == [("list_similar_incidents", {"IncidentId": "inc-1"})]


def test_a_post_mortem_is_printed_as_it_is(run) -> None:
    answer = {"IncidentId": "inc-1", "Format": "markdown", "FileName": "x.md", "Content": "# Post-mortem\n\n[a]\n"}
    code, out, _, calls = run("incidents", "export", "inc-1", "--format", "markdown", export_incident=answer)
    assert (code, out) == (0, "# Post-mortem\n\n[a]\n")
    assert calls == [("export_incident", {"IncidentId": "inc-1", "Format": "markdown"})]


def test_a_job_is_taken_over_and_handed_back(run) -> None:
    code, out, err, _ = run("jobs", "take-over", "gpt", "--reason", "x", take_over_training_job={})
    assert (code, out) == (0, "gpt is yours\n")
    assert "everstep jobs hand-back gpt" in err
    code, out, _, _ = run("jobs", "hand-back", "gpt", hand_back_training_job={})
    assert (code, out) == (0, "Everstep manages gpt again\n")


def test_a_job_continues_from_the_step_that_a_person_accepts(run) -> None:
    code, out, _, calls = run("jobs", "accept-loss", "gpt", "--from-step", "30", accept_loss={})
    assert (code, out) == (0, "gpt continues from step 30\n")
    assert calls == [("accept_loss", {"TrainingJobName": "gpt", "FromStep": 30})]


ENDED = {"ExitCode": 0, "Stdout": "out\n", "Stderr": "", "IsOutputCut": False, "IsTimedOut": False}


def test_a_program_beside_a_rank_is_given_stdin_only_where_that_is_said(run, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("step 1\nstep 2\n"))
    words = ("jobs", "exec", "gpt", "--rank", "0")
    code, out, _, calls = run(*words, "--", "cat", execute_command=ENDED)
    assert (code, out, "Stdin" in calls[0][1]) == (0, "out\n", False)
    _, _, _, calls = run(*words, "-i", "--", "cat", "-i", execute_command=ENDED)
    assert (calls[0][1]["Stdin"], calls[0][1]["Command"]) == ("step 1\nstep 2\n", ["cat", "-i"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 100_000))
    _, _, _, calls = run(*words, "--stdin", "--", "cat", execute_command=ENDED)
    assert len(calls[0][1]["Stdin"]) == 65_537, "so much that the contract refuses it, and no more"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    code, _, err, calls = run(*words, "-i", "--", "cat", execute_command=ENDED)
    assert (code, calls) == (2, [])
    assert "not UTF-8 text" in err


def test_drills_are_started_and_listed(run) -> None:
    drill = {
        "DrillId": "drill-1",
        "DrillType": "kill-rank",
        "DrillStatus": "recovered",
        "TrainingJobName": "gpt",
        "NodeId": "i-1",
        "Rank": 0,
        "RequestedBy": "ann",
        "CreationTime": AT,
        "IncidentId": "inc-1",
    }
    code, out, _, calls = run("drills", "start", "kill-rank", "--job", "gpt", "--rank", "0", "-y", start_drill=drill)
    assert (code, out) == (0, "drill-1: kill-rank on i-1, rank 0\n")
    assert calls == [("start_drill", {"TrainingJobName": "gpt", "DrillType": "kill-rank", "Rank": 0})]
    code, out, _, _ = run("drills", "list", list_drills={"Drills": [drill]})
    assert code == 0
    assert all(word in out for word in ("drill-1", "recovered", "inc-1", "ann"))

"""`--debug` prints every request and response, including retries, without secrets."""

from __future__ import annotations

import logging
import re
import sys
from contextlib import closing
from pathlib import Path

import pytest

from control_plane.db import events as stored
from control_plane.db.events import NewEvent
from everstep import exchanges
from everstep.cli import main as cli
from everstep.exchanges import MASK, MAX_LOGGED_CHARACTERS
from tests.unit.control_plane.api.conftest import Service
from tests.unit.everstep.test_sdk import GONE, Wire, refusal


@pytest.fixture
def service(tmp_path: Path):
    with Service(tmp_path) as running:
        yield running


def command(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["everstep", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_the_command_line_shows_what_goes_to_and_fro_and_keeps_its_secrets(service, monkeypatch, capsys) -> None:
    monkeypatch.setenv("EVERSTEP_ENDPOINT_URL", f"http://{service.address}")
    monkeypatch.setenv("EVERSTEP_TOKEN", service.admin_token)
    code, out, err = command(
        monkeypatch, capsys, "tokens", "create", "--role", "viewer", "--description", "ci", "--debug"
    )
    assert code == 0
    secret = out.strip()
    assert all(hidden not in err for hidden in (secret, service.admin_token, "Bearer"))
    lines = [line.partition(" ")[2] for line in err.splitlines()]
    assert re.fullmatch(rf"endpoint http://{service.address}, everstep \S+, botocore \S+", lines[0])
    assert lines[1] == 'CreateToken {"Role": "viewer", "Description": "ci"}'
    assert lines[2] == f"> POST http://{service.address}/v1/tokens"
    assert f"> Authorization: {MASK}" in lines
    assert "< 201 in attempt 1" in lines
    assert any(re.fullmatch("< x-amzn-requestid: [0-9a-f-]+", line) for line in lines)
    assert any(line.startswith(f'< {{"Secret": "{MASK}", "Token": {{"TokenId": "tok-') for line in lines)
    code, _, err = command(monkeypatch, capsys, "tokens", "list")
    assert (code, err) == (0, ""), "it is off again"


def test_every_attempt_is_told(monkeypatch, caplog) -> None:
    caplog.set_level(logging.DEBUG, logger=exchanges.log.name)
    Wire(monkeypatch, GONE, refusal(503, "ServiceUnavailableException"), {"Fleets": []}).client().list_fleets()
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if line.startswith("> GET")] == ["> GET http://127.0.0.1:1/v1/fleets"] * 3
    attempts = [line for line in told if re.match(r"< .* in attempt \d", line)]
    assert attempts[0].startswith("< nothing in attempt 1: Could not connect")
    assert attempts[1:] == ["< 503 in attempt 2", "< 200 in attempt 3"]
    assert any('"Code": "ServiceUnavailableException"' in line for line in told)


def test_values_that_people_hide_in_requests_are_hidden(monkeypatch, caplog) -> None:
    caplog.set_level(logging.DEBUG, logger=exchanges.log.name)
    client = Wire(monkeypatch, {"TrainingJobName": "gpt"}).client()
    job = {"TrainingJobName": "gpt", "Source": {"SourceId": "0" * 64}, "EntryPoint": "train.py", "NodeCount": 1}
    client.create_training_job(**job, Environment={"API_KEY": "hush-1"}, HyperParameters={"lr": "0.1"})
    client.put_source(SourceId="0" * 64, Body=b"hush-2")
    client.execute_command(TrainingJobName="gpt", Rank=0, Command=["cat"], Stdin="hush-3")
    assert "hush" not in caplog.text
    assert f'"Environment": "{MASK}", "HyperParameters": {{"lr": "0.1"}}' in caplog.text
    assert '"Body": "<6 bytes>"' in caplog.text


def test_a_long_answer_is_cut(monkeypatch, caplog) -> None:
    caplog.set_level(logging.DEBUG, logger=exchanges.log.name)
    Wire(monkeypatch, {"TrainingJobSummaries": [{"TrainingJobName": "n" * 60}] * 1000}).client().list_training_jobs()
    assert max(len(record.getMessage()) for record in caplog.records) < MAX_LOGGED_CHARACTERS + 100


def test_a_stream_of_events_is_told_too(service, caplog) -> None:
    with service.database.write() as session:
        stored.append(session, NewEvent(at=service.clock(), type="Test", message="one", job_name="gpt"))
    caplog.set_level(logging.DEBUG, logger=exchanges.log.name)
    client = service.client()
    with closing(client.follow_events(AfterEventId=0)) as stream:
        next(iter(stream))
    client.close()
    told = [record.getMessage() for record in caplog.records]
    assert f"> GET http://{service.address}/v1/events/stream?AfterEventId=0" in told
    assert "< 200" in told
    assert service.admin_token not in caplog.text


def test_nobody_who_does_not_listen_pays_for_it(monkeypatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(exchanges, "_body_text", lambda *said: told.append(said))
    Wire(monkeypatch, {"Fleets": []}).client().list_fleets()
    assert told == []

"""Tests the client with a service that does not answer or sends invalid answers.

Other tests check normal requests and answers against the real API.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.exceptions import ConnectTimeoutError, EndpointConnectionError, ReadTimeoutError

import everstep
from everstep import failures, sdk
from everstep.errors import ConfigurationError, ServiceFailed

URL = "http://127.0.0.1:1"
GONE = EndpointConnectionError(endpoint_url=URL)


class Wire:
    """A fake transport that returns answers from a list. If an answer is an exception, the transport raises it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: object) -> None:
        self.answers = list(answers)
        self.requests: list[Any] = []
        self.pauses: list[float] = []
        monkeypatch.setattr("botocore.endpoint.time.sleep", self.pauses.append)

    def __call__(self, request: Any, **_: Any) -> AWSResponse:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        status, headers, body = (
            answer if isinstance(answer, tuple) else (200, {"x-amzn-requestid": "r-1"}, json.dumps(answer))
        )
        raw = io.BytesIO(body.encode())
        # urllib3's responses have this method
        raw.stream = lambda *_, **__: iter([body.encode()])  # type: ignore[attr-defined]
        return AWSResponse(request.url, status, headers, raw)

    def client(self, **options: Any) -> Any:
        made = everstep.client(URL, "hush", **options)
        made.meta.events.register("before-send.everstep", self)
        return made


def refusal(status: int, code: str, **more: object) -> tuple[int, dict[str, str], str]:
    return (
        status,
        {"x-amzn-errortype": code, "x-amzn-requestid": "r-1"},
        json.dumps({"Code": code, "Message": "No.", "Hint": "Try.", **more}),
    )


def test_it_is_a_client_as_boto3_makes_them():
    client = everstep.client(URL, "t")
    assert type(client).__mro__[-2].__name__ == "BaseClient"
    assert client.meta.service_model.service_name == "everstep"
    assert callable(client.upload_source)


def test_what_may_work_later_is_tried_again(monkeypatch):
    wire = Wire(
        monkeypatch,
        GONE,
        refusal(503, "ServiceUnavailableException"),
        refusal(429, "ThrottlingException"),
        {"Fleets": []},
    )
    answer = wire.client().list_fleets()
    assert (answer["Fleets"], answer["ResponseMetadata"]["RetryAttempts"], len(wire.pauses)) == ([], 3, 3)


def test_nothing_is_tried_for_ever(monkeypatch):
    wire = Wire(monkeypatch, GONE)
    with pytest.raises(EndpointConnectionError):
        wire.client().list_fleets()
    assert len(wire.requests) == 4


def test_the_users_own_settings_win(monkeypatch):
    wire = Wire(monkeypatch, GONE)
    with pytest.raises(EndpointConnectionError):
        wire.client(config=Config(retries={"total_max_attempts": 1})).list_fleets()
    assert len(wire.requests) == 1


def test_a_refusal_is_not_tried_again(monkeypatch):
    wire = Wire(monkeypatch, refusal(409, "ConflictException"))
    client = wire.client()
    with pytest.raises(client.exceptions.ConflictException) as refused:
        client.list_fleets()
    assert refused.value.response["Hint"] == "Try."
    assert len(wire.requests) == 1


def test_the_token_travels_and_names_are_escaped(monkeypatch):
    wire = Wire(monkeypatch, {})
    wire.client().describe_training_job(TrainingJobName="../fleets?x=1#")
    (request,) = wire.requests
    assert request.headers["Authorization"] in ("Bearer hush", b"Bearer hush")
    assert request.url == f"{URL}/v1/training-jobs/..%2Ffleets%3Fx%3D1%23"


def test_no_token_crosses_a_network_in_the_clear(monkeypatch):
    with pytest.raises(ConfigurationError, match="unencrypted"):
        everstep.client("http://10.0.0.1", "hush")
    wire = Wire(monkeypatch, {})
    client = wire.client()
    client.meta.events.register_first(
        "before-sign.everstep", lambda request, **_: setattr(request, "url", "http://10.0.0.1/v1/fleets")
    )
    with pytest.raises(ConfigurationError, match="unencrypted"):
        client.list_fleets()
    assert wire.requests == []


def test_clients_share_one_session_and_neither_token_nor_address(monkeypatch):
    everstep.client(URL, "first")
    monkeypatch.setattr("botocore.session.Session", lambda **_: pytest.fail("a second session was made"))
    wires = [Wire(monkeypatch, {}), Wire(monkeypatch, {})]
    clients = [everstep.client(f"{URL}{number}", f"token-{number}") for number in range(2)]
    for client, wire in zip(clients, wires, strict=True):
        client.meta.events.register("before-send.everstep", wire)
    for client in clients:
        client.list_fleets()
    for number, wire in enumerate(wires):
        (request,) = wire.requests
        assert request.url == f"{URL}{number}/v1/fleets"
        assert request.headers["Authorization"] in (f"Bearer token-{number}", f"Bearer token-{number}".encode())


def test_nothing_of_the_users_aws_configuration_is_read(monkeypatch, tmp_path):
    monkeypatch.setattr(sdk, "shared_session", sdk.shared_session.__wrapped__)  # a session that has read nothing yet
    (tmp_path / "config").write_text("not = a configuration")
    monkeypatch.setenv("AWS_PROFILE", "none-of-that-name")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://trap.invalid")
    wire = Wire(monkeypatch, {"Fleets": []})
    assert wire.client().list_fleets()["Fleets"] == []
    assert wire.requests[0].url.startswith(URL)


def test_a_page_of_something_else_is_no_answer(monkeypatch):
    with pytest.raises(ConfigurationError, match="is not from Everstep"):
        Wire(monkeypatch, (200, {"content-type": "text/html"}, "<html>")).client().list_fleets()


@pytest.mark.parametrize("arguments", [{}, {"Directory": ".", "Body": b""}])
def test_a_source_comes_one_way_or_the_other(arguments):
    with pytest.raises(ConfigurationError):
        everstep.client(URL, "t").upload_source(**arguments)


# Tests of error messages


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (
            refusal(400, "ValidationException", Fields=[{"Field": "A", "Message": "is missing"}]),
            "ValidationException",
            "No.",
        ),
        (refusal(403, "AccessDeniedException"), "AccessDeniedException", "No."),
        (refusal(500, "InternalServerException"), "InternalServerException", "No."),
        ((502, {}, "<html>"), failures.UNAVAILABLE, "HTTP 502"),
        ((404, {}, "{}"), "", "HTTP 404"),
        ((302, {"location": "http://evil.example"}, ""), "", "HTTP 302"),
        (GONE, failures.UNAVAILABLE, "does not respond"),
        (ReadTimeoutError(endpoint_url=URL), failures.UNAVAILABLE, "does not respond"),
        (ConnectTimeoutError(endpoint_url=URL), failures.UNAVAILABLE, "does not respond"),
    ],
)
def test_every_failure_can_be_told(monkeypatch, answer, code, words):
    with pytest.raises(ServiceFailed, match=words) as told, failures.translated():
        Wire(monkeypatch, answer).client().list_fleets()
    assert told.value.code == code
    assert told.value.hint
    assert bool(told.value.fields) == (code == "ValidationException")
    assert told.value.request_id == ("r-1" if isinstance(answer, tuple) and "x-amzn-errortype" in answer[1] else "")


def test_what_the_client_refuses_is_told_as_the_service_would():
    with pytest.raises(ServiceFailed) as told, failures.translated():
        everstep.client(URL, "t").create_fleet(FleetName="main")
    assert (told.value.code, [(error.field, error.message) for error in told.value.fields]) == (
        "ValidationException",
        [("AutoScalingGroupName", "is missing")],
    )


def test_ranks_and_help_do_without_botocore():
    code = (
        "import sys, everstep, everstep.cli.main; print([name for name in ('botocore', 'boto3', 'httpx') if "
        "name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["checkpoints.open_checkpoint", "integrations", "training.init"])
def test_a_process_that_imports_only_everstep_finds_its_packages(name: str) -> None:
    """A warm rank finds them too, because its template has imported `everstep.training`."""
    subprocess.run([sys.executable, "-c", f"import everstep; everstep.{name}"], check=True)

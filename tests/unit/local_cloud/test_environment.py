"""The local AWS never reaches real AWS, whatever the user's configuration contains."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from botocore.parsers import ResponseParserError

from control_plane.cloud.connection import CloudMode, CloudSettings, Connection
from control_plane.cloud.errors import EndpointRefused as ControlPlaneRefused
from everstep.host.local_keys import LocalKeys
from infra.local_cloud.environment import POISONOUS, aws_variables, local_client, process_environment
from infra.local_cloud.errors import LocalEndpointRefused

KEYS = LocalKeys(access_key_id="LOCAL0", secret_access_key="local")
REAL = "https://s3.us-east-1.amazonaws.com"
ELSEWHERE = [
    REAL,
    "http://10.0.0.1:80",
    "http://127.0.0.1.evil.example",
    "http://evil.example#127.0.0.1",
    "http://127.0.0.1@evil.example",
    "",
    "//",
    "http://[",
]


class Recorder(HTTPServer):
    """A server that answers every request with an empty 200 and records the requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Authorization", "")))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def recorder() -> Any:
    with Recorder() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def poison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> dict[str, str]:
    """Configure files, variables and a proxy as a user of real AWS does.

    Every setting leads to the recorder's port, under a host name that the local AWS never uses.
    """
    home = tmp_path / "home"
    (home / ".aws").mkdir(parents=True)
    trap = "http://trap.invalid:1"
    config = (
        f"[default]\nregion = eu-central-1\nendpoint_url = {trap}\nuse_fips_endpoint = true\n"
        f"[profile work]\nregion = eu-west-1\nservices = s\n[services s]\ns3 =\n  endpoint_url = {trap}\n"
    )
    keys = (
        "aws_access_key_id = AKIAREALREALREALREAL\naws_secret_access_key = real/real/real\naws_session_token = real\n"
    )
    (home / ".aws" / "config").write_text(config)
    (home / ".aws" / "credentials").write_text(f"[default]\n{keys}[work]\n{keys}")
    variables = {
        "HOME": str(home),
        "AWS_PROFILE": "no-such-profile",
        "AWS_CONFIG_FILE": str(home / ".aws" / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(home / ".aws" / "credentials"),
        "AWS_ACCESS_KEY_ID": "AKIAREALREALREALREAL",
        "AWS_SECRET_ACCESS_KEY": "real/real/real",
        "AWS_SESSION_TOKEN": "real",
        "AWS_REGION": "eu-west-3",
        "AWS_DEFAULT_REGION": "eu-west-3",
        "AWS_ENDPOINT_URL": trap,
        "AWS_ENDPOINT_URL_S3": trap,
        "AWS_ENDPOINT_URL_AUTO_SCALING": trap,
        "AWS_CA_BUNDLE": "/no/such/bundle",
        "AWS_USE_FIPS_ENDPOINT": "true",
        "AWS_USE_DUALSTACK_ENDPOINT": "true",
        "HTTP_PROXY": trap,
        "http_proxy": trap,
        "HTTPS_PROXY": trap,
        "ALL_PROXY": trap,
    }
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


def control_plane_client(service: str, url: str) -> Any:
    return Connection(CloudSettings(mode=CloudMode.LOCAL, endpoint_url=url, keys=KEYS)).client(service)


def command_line_client(service: str, url: str) -> Any:
    return local_client(service, url, KEYS)


@pytest.mark.parametrize("make", [command_line_client, control_plane_client])
def test_a_poisoned_configuration_changes_nothing(make: Any, recorder: Recorder, poison: dict[str, str]) -> None:
    client = make("s3", recorder.url)
    client.get_object(Bucket="b", Key="k")
    client.close()
    (path, authorization) = recorder.requests[0]
    assert path == "/b/k"
    assert f"Credential={KEYS.access_key_id}/" in authorization
    assert "/us-east-1/s3/" in authorization
    assert client.meta.region_name == "us-east-1"
    assert "AKIA" not in authorization


@pytest.mark.parametrize("make", [command_line_client, control_plane_client])
def test_nor_does_it_for_the_other_services(make: Any, recorder: Recorder, poison: dict[str, str]) -> None:
    client = make("autoscaling", recorder.url)
    with contextlib.suppress(ResponseParserError):  # the client cannot parse the recorder's empty answer
        client.describe_auto_scaling_groups()
    client.close()
    assert f"Credential={KEYS.access_key_id}/" in recorder.requests[0][1]


@pytest.mark.parametrize("make", [command_line_client, control_plane_client])
@pytest.mark.parametrize("url", ELSEWHERE)
def test_another_machine_is_refused_before_the_first_call(make: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_asks(*_: object, **__: object) -> None:
        raise AssertionError("a name was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", nobody_asks)
    with pytest.raises((LocalEndpointRefused, ControlPlaneRefused)):
        make("s3", url)


@pytest.mark.parametrize("make", [command_line_client, control_plane_client])
def test_a_client_that_is_led_elsewhere_refuses_to_go(make: Any, recorder: Recorder) -> None:
    client = make("s3", recorder.url)

    def lead_away(request: Any, **_: object) -> None:
        request.url = REAL

    client.meta.events.register("before-sign.s3", lead_away)
    with pytest.raises((LocalEndpointRefused, ControlPlaneRefused), match="amazonaws"):
        client.get_object(Bucket="b", Key="k")
    client.close()
    assert recorder.requests == []


def test_local_mode_without_an_endpoint_is_refused() -> None:
    with pytest.raises(ControlPlaneRefused):
        Connection(CloudSettings(mode=CloudMode.LOCAL))


def test_s3_may_be_another_server_on_this_machine(recorder: Recorder) -> None:
    local = CloudSettings(mode=CloudMode.LOCAL, endpoint_url="http://127.0.0.1:1", keys=KEYS)
    Connection(replace(local, s3_endpoint_url=recorder.url)).client("s3").get_object(Bucket="b", Key="k")
    assert f"Credential={KEYS.access_key_id}/" in recorder.requests[0][1]
    with pytest.raises(ControlPlaneRefused, match="amazonaws"):
        Connection(replace(local, s3_endpoint_url=REAL))


def test_processes_get_an_environment_made_from_nothing(poison: dict[str, str]) -> None:
    made = {**process_environment("/marker"), **aws_variables("http://127.0.0.1:7", KEYS)}
    assert made["HOME"] == poison["HOME"]
    assert made["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert made["EVERSTEP_LOCAL_CLUSTER"] == "/marker"
    assert not any("real" in value.lower() or "trap" in value for name, value in made.items() if name != "HOME")
    assert not set(made) & set(POISONOUS)


def test_boto3_itself_in_such_a_process_goes_nowhere_else(recorder: Recorder, poison: dict[str, str]) -> None:
    environment = {**process_environment("/marker"), **aws_variables(recorder.url, KEYS)}
    code = "import boto3; boto3.client('s3').get_object(Bucket='b', Key='k')"
    subprocess.run([sys.executable, "-P", "-c", code], env=environment, check=True, timeout=30)
    assert f"Credential={KEYS.access_key_id}/" in recorder.requests[0][1]


def test_variables_for_another_machine_are_not_made() -> None:
    with pytest.raises(LocalEndpointRefused):
        aws_variables(REAL, KEYS)

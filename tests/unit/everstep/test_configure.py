"""Tests the files that `everstep configure` writes.

With these files, plain boto3 and the AWS CLI reach the service.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from control_plane.db import events
from control_plane.db.events import NewEvent
from control_plane.db.tokens import Role
from everstep import aws_models, aws_plugin, config
from everstep.cli import main as cli
from everstep.config import ClientConfig
from everstep.errors import ConfigurationError
from tests.unit.control_plane.api.conftest import Service

AWS = str(Path(sys.executable).with_name("aws"))
"""The AWS CLI of the tests' own environment. Any other AWS CLI could not import Everstep's plugin."""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "EVERSTEP_ENDPOINT_URL", "EVERSTEP_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def configure(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["everstep", "configure", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
def configured(home, service, monkeypatch) -> Path:
    assert configure(monkeypatch, "--endpoint-url", f"http://{service.address}", "--token", service.admin_token) == 0
    return home


def environment(home: Path) -> dict[str, str]:
    """Return an environment with the search path of this process and a home folder.

    It also disables the credentials of an EC2 instance.
    """
    return {"HOME": str(home), "PATH": os.environ["PATH"], "AWS_EC2_METADATA_DISABLED": "true"}


def run_python(home: Path, code: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(
        command, env={**environment(home), **more}, cwd=home, capture_output=True, text=True, timeout=50, check=False
    )


def test_the_sdk_and_the_command_line_find_what_was_configured(configured, service):
    assert config.load() == ClientConfig(f"http://{service.address}", service.admin_token)
    told = run_python(configured, "import everstep; print(everstep.client().get_health()['Status'])")
    assert told.stdout == "ok\n", told.stderr


@pytest.mark.parametrize(
    "session", ['boto3.Session(profile_name="everstep")', 'boto3.Session(region_name="eu-west-1")']
)
def test_plain_boto3_speaks_to_the_service(configured, session):
    told = run_python(
        configured,
        f"import boto3\nc = {session}.client('everstep')\nprint(c.list_fleets()['Fleets'], "
        "c.get_waiter('fleet_ready').name)\n"
        "try:\n    c.describe_node(NodeId='i-1')\nexcept c.exceptions.ResourceNotFoundException as e: print(e)",
    )
    assert told.stdout.startswith("[] FleetReady\nAn error occurred (ResourceNotFoundException)"), told.stderr


def test_the_token_goes_nowhere_else(configured, service):
    """The client sends its token only to the endpoint of its profile.

    If AWS_ENDPOINT_URL contains another address, the client sends no request.
    """
    told = run_python(
        configured,
        "import boto3; boto3.client('everstep').list_fleets()",
        AWS_PROFILE="everstep",
        AWS_ENDPOINT_URL="http://127.0.0.1:9",
    )
    assert "No token is configured for this endpoint. Tokens exist for http://127.0.0.1" in told.stderr
    assert service.admin_token not in told.stderr


def test_the_aws_cli_speaks_to_the_service(configured):
    command = [AWS, "--profile", "everstep", "everstep", "list-fleets", "--output", "json"]
    told = subprocess.run(
        command, env=environment(configured), cwd=configured, capture_output=True, text=True, timeout=50, check=False
    )
    assert json.loads(told.stdout) == {"Fleets": []}, told.stderr


def run_aws(home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**environment(home), **more}
    return subprocess.run([AWS, *words], env=env, cwd=home, capture_output=True, text=True, timeout=50, check=False)


def test_the_aws_cli_sends_the_token_of_the_environment_with_the_plugin(configured, service):
    def role(profile: str, **more: str) -> str:
        query = ("--query", "Role", "--output", "text")
        told = run_aws(configured, "--profile", profile, "everstep", "get-caller-identity", *query, **more)
        return told.stdout.strip() or told.stderr

    viewer = service.token(Role.VIEWER)
    assert role("everstep", EVERSTEP_TOKEN=viewer) == "admin", "without the plugin"
    assert run_aws(configured, "configure", "set", "plugins.everstep", "everstep.aws_plugin").returncode == 0
    assert role("everstep", EVERSTEP_TOKEN=viewer, EVERSTEP_ENDPOINT_URL=f"http://{service.address}/") == "viewer"
    assert role("everstep", EVERSTEP_TOKEN=viewer, EVERSTEP_ENDPOINT_URL="https://other.example") == "admin", (
        "it is for another endpoint"
    )
    with (configured / ".aws" / "config").open("a") as file:
        file.write("\n[profile everstep-staging]\nregion = us-east-1\n")
    assert role("everstep-staging", EVERSTEP_TOKEN=viewer) == "admin", "a named profile wins over the environment"


def test_the_plugin_sends_no_token_across_a_network_in_the_clear():
    assert aws_plugin.is_for("https://everstep.example/v1/fleets", {})
    assert aws_plugin.is_for("http://127.0.0.1:8080/v1/fleets", {"EVERSTEP_ENDPOINT_URL": "http://127.0.0.1:8080/"})
    assert not aws_plugin.is_for(
        "https://everstep.example/v1", {"EVERSTEP_ENDPOINT_URL": "https://everstep.example.evil"}
    )
    with pytest.raises(ConfigurationError):
        aws_plugin.is_for("http://everstep.example/v1/fleets", {})


def test_the_aws_cli_lists_no_operation_that_it_cannot_print(tmp_path):
    from botocore.model import ServiceModel

    written = aws_models.install(tmp_path, None)
    (file,) = [path for path in written if path.name == "service-2.json"]
    model = ServiceModel(json.loads(file.read_text()), "everstep")
    operations = [model.operation_model(name) for name in model.operation_names]
    assert "GetLogEvents" in model.operation_names
    assert [operation.name for operation in operations if operation.has_event_stream_output] == []


def test_whatever_holds_the_token_is_its_owners_alone(configured, service):
    holding = [path for path in configured.rglob("*") if path.is_file() and service.admin_token in path.read_text()]
    assert {path.name for path in holding} == {"config.toml", "endpoint-rule-set-1.json"}
    assert [oct(path.stat().st_mode & 0o777) for path in holding] == ["0o600", "0o600"]


def test_configuring_again_changes_the_service_and_keeps_what_is_the_users(configured, monkeypatch):
    path = configured / ".aws" / "config"
    path.write_text("[default]\nregion = eu-west-3\n\n" + path.read_text().replace("us-east-1", "eu-north-1"))
    before = path.read_text()
    assert (
        configure(monkeypatch, "--endpoint-url", "https://everstep.example/", "--token", "another", "--no-check") == 0
    )
    assert config.load() == ClientConfig("https://everstep.example", "another")
    assert path.read_text() == before


def test_a_profile_is_added_behind_those_that_are_there(home, monkeypatch):
    (home / ".aws").mkdir()
    (home / ".aws" / "config").write_text("[default]\nregion = eu-west-3")
    assert configure(monkeypatch, "--endpoint-url", "https://everstep.example", "--token", "t", "--no-check") == 0
    assert (
        home / ".aws" / "config"
    ).read_text() == "[default]\nregion = eu-west-3\n\n[profile everstep]\nregion = us-east-1\n"


def test_a_profile_that_is_configured_again_means_the_new_endpoint(configured, monkeypatch):
    path = configured / ".aws" / "config"
    for url in ("https://wrong.example", "https://right.example"):
        assert configure(monkeypatch, "--profile", "staging", "--endpoint-url", url, "--token", "t", "--no-check") == 0
    text = path.read_text()
    assert text.count("[profile everstep-staging]") == 1
    assert "endpoint_url = https://right.example\n" in text
    assert "wrong" not in text


def test_what_a_profile_of_the_users_does_not_say_is_told(configured, monkeypatch, capsys):
    """`everstep configure` prints settings that a user's own section of a profile lacks, but does not add them.

    Other services may use the same profile, and would get settings such as `ca_bundle` too.
    """
    path, bundle = configured / ".aws" / "config", configured / "ca.pem"
    bundle.touch()
    asked = ("--profile", "prod", "--token", "t", "--no-check", "--endpoint-url")
    assert configure(monkeypatch, *asked, "https://old.example") == 0
    assert "by hand" not in capsys.readouterr().err
    assert configure(monkeypatch, *asked, "https://new.example", "--ca-bundle", str(bundle)) == 0
    wanted = (
        f"[profile everstep-prod]\nca_bundle = {bundle}\nservices = everstep-prod\n\n[services "
        "everstep-prod]\neverstep =\n"
    )
    assert (
        f"by hand: it must say this, and no other ca_bundle:\n{wanted}  endpoint_url = https://new.example\n"
        in capsys.readouterr().err
    )
    path.write_text(
        path.read_text()
        .replace("region = ", f"ca_bundle = {bundle}\nregion = ")
        .replace("=\n  endpoint", "=\n    # ours\n    endpoint")
    )
    assert configure(monkeypatch, *asked, "https://new.example", "--ca-bundle", str(bundle)) == 0
    assert "by hand" not in capsys.readouterr().err, "it says all of it, in its own form"
    before = path.read_text()
    assert configure(monkeypatch, *asked, "https://newer.example", "--ca-bundle", str(bundle)) == 0
    assert f"{wanted}  endpoint_url = https://newer.example\n" in capsys.readouterr().err
    assert configure(monkeypatch, *asked, "https://new.example") == 0
    assert "no other ca_bundle" in capsys.readouterr().err
    assert path.read_text() == before


@pytest.mark.parametrize(
    "own", ["[profile everstep]  # mine\nregion = eu-west-3\nca_bundle = other.pem\n", "[profile everstep]\nnothing\n"]
)
def test_a_profile_is_not_added_to_one_of_the_users(home, monkeypatch, capsys, own):
    (home / ".aws").mkdir()
    (home / ".aws" / "config").write_text(own)
    assert configure(monkeypatch, "--endpoint-url", "https://everstep.example", "--token", "t", "--no-check") == 0
    assert (home / ".aws" / "config").read_text() == own
    assert "by hand" in capsys.readouterr().err


def test_nobody_acts_with_the_token_of_another_profile(configured, service, monkeypatch):
    """Two profiles have the same endpoint and different tokens. The client refuses them.

    A client of AWS would choose the token by the endpoint, and might send the token of the other profile.
    """
    url = f"http://{service.address}"
    assert configure(monkeypatch, "--profile", "viewer", "--endpoint-url", url, "--token", "viewers", "--no-check") == 0
    code = "import boto3; print(boto3.client('everstep').list_fleets()['Fleets'])"
    told = run_python(configured, code, AWS_PROFILE="everstep-viewer")
    assert f"Profiles with different tokens use the endpoint {url}" in told.stderr
    assert run_python(configured, code, AWS_PROFILE="everstep").stdout == "[]\n", (
        "the default profile names no endpoint"
    )


def test_each_profile_has_its_service_in_every_client(configured, service, monkeypatch):
    """Two profiles name the same service by different addresses. Every client uses the address of its own profile."""
    url = f"http://localhost:{service.address.rpartition(':')[2]}"
    assert configure(monkeypatch, "--profile", "staging", "--endpoint-url", url, "--token", service.admin_token) == 0
    assert config.load() == ClientConfig(f"http://{service.address}", service.admin_token), "the default is what it was"
    assert config.load(profile="staging") == ClientConfig(url, service.admin_token)
    (configured / ".aws" / "config").read_text().index(
        f"[services everstep-staging]\neverstep =\n  endpoint_url = {url}\n"
    )
    code = (
        "import boto3, everstep\nprint(boto3.client('everstep').meta.endpoint_url, "
        "everstep.client(profile_name='staging').list_fleets()['Fleets'])\n"
    )
    code += "print(boto3.client('everstep').list_fleets()['Fleets'])"
    told = run_python(configured, code, AWS_PROFILE="everstep-staging")
    assert told.stdout == f"{url} []\n[]\n", told.stderr
    told = run_python(
        configured, "import boto3; print(boto3.client('everstep').list_fleets()['Fleets'])", AWS_PROFILE="everstep"
    )
    assert told.stdout == "[]\n", told.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--endpoint-url", "http://10.0.0.1", "--token", "t"), 2),
        (("--endpoint-url", "{url}", "--token", "wrong"), 254),
        (("--endpoint-url", "http://127.0.0.1:9", "--token", "t"), 254),
    ],
)
def test_what_does_not_work_is_not_written_down(home, service, monkeypatch, arguments, code):
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _seconds: None)
    assert configure(monkeypatch, *(word.replace("{url}", f"http://{service.address}") for word in arguments)) == code
    assert list(home.iterdir()) == []


def test_a_token_in_the_clear_is_not_installed(tmp_path):
    with pytest.raises(ConfigurationError, match="unencrypted"):
        aws_models.install(tmp_path, ClientConfig("http://10.0.0.1", "t"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output", ["text", "table", "json"])
def test_who_has_seen_enough_is_no_failure(configured, service, output):
    """A reader that closes the pipe after the first line causes no error.

    The output is larger than the pipe's buffer.
    """
    with service.database.write() as session:
        for number in range(1500):
            events.append(session, NewEvent(at=service.clock(), type="Test", message=f"{number} {'x' * 100}"))
    program = f"{sys.executable} -P -c 'from everstep.cli.main import main; main()'"
    pipe = f"set -o pipefail; {program} events list --max-items 1500 --output {output} | head -n 1"
    told = subprocess.run(
        ["bash", "-c", pipe],
        env=environment(configured),
        cwd=configured,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (told.returncode, told.stderr, len(told.stdout.splitlines())) == (0, "", 1)

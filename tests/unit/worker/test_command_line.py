"""Tests the agent's command line. The agent reports missing or wrong settings before it starts any work."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from tests.instance_metadata import served
from worker.__main__ import allow_files, aws_environment, confine, settings
from worker.node import metadata_rule, rank_user
from worker.node.instance_metadata import EC2_ENDPOINT
from worker.node.rank_user import RankUser
from worker.ranks.shim.cgroups import JobLimits
from worker.storage.aws import aws_client


def arguments(state: Path, url: str = "http://127.0.0.1:8000") -> list[str]:
    return [
        "--control-plane-url",
        url,
        "--instance-id",
        "i-1",
        "--address",
        "127.0.0.2",
        "--state-dir",
        str(state),
        "--memory-bytes",
        "1000",
    ]


def test_what_is_given_counts(tmp_path: Path) -> None:
    found = settings(arguments(tmp_path / "state"))
    assert (found.node_id, found.address, found.memory_bytes, found.control_plane_urls) == (
        "i-1",
        "127.0.0.2",
        1000,
        ("http://127.0.0.1:8000",),
    )
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_a_processor_whose_stores_have_no_order_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agent refuses to start on a processor that may reorder stores to memory.

    Ranks and agents read a shared page without a lock, which needs ordered stores (`everstep.protocol.rank_messages`).
    """
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(SystemExit):
        settings(arguments(tmp_path / "state"))
    assert (
        "nodes need x86_64 processors; this node has aarch64: choose another instance type" in capsys.readouterr().err
    )
    assert not (tmp_path / "state").exists()


def test_the_region_that_an_agent_is_told_is_that_of_its_aws_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    chosen = settings([*arguments(tmp_path), "--fleet", "main", "--server-id", "0" * 32, "--region", "eu-west-1"])
    for named, region in (
        ({}, "eu-west-1"),
        ({"AWS_REGION": "eu-north-1"}, "eu-north-1"),
        ({"AWS_DEFAULT_REGION": "eu-south-1"}, "eu-south-1"),
    ):
        client = aws_client(
            "s3", aws_environment(chosen, {**named, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"})
        )
        assert client.meta.region_name == region
        client.close()
    assert aws_environment(settings(arguments(tmp_path)), {"A": "b"}) == {"A": "b"}


@pytest.mark.parametrize("url", ["", "http://[", "127.0.0.1:8000", "ws://127.0.0.1", "http://127.0.0.1:none"])
def test_a_url_that_is_none_is_refused_before_anything_is_made(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        settings(arguments(tmp_path / "state", url))
    assert f"--control-plane-url {url!r} is not an http or https URL" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_figures_for_prometheus_are_off_or_on_loopback_unless_said_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert settings(arguments(tmp_path)).metrics_address is None
    assert settings([*arguments(tmp_path), "--metrics-port", "9500"]).metrics_address == ("127.0.0.1", 9500)
    assert settings(
        [*arguments(tmp_path), "--metrics-port", "9500", "--metrics-address", "10.0.0.1"]
    ).metrics_address == ("10.0.0.1", 9500)
    with pytest.raises(SystemExit):
        settings([*arguments(tmp_path), "--metrics-port", "65536"])
    assert "--metrics-port 65536 is not a port" in capsys.readouterr().err


def test_the_log_is_for_people_unless_said_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert settings(arguments(tmp_path)).log_format == "text"
    assert settings([*arguments(tmp_path), "--log-format", "json"]).log_format == "json"
    monkeypatch.setenv("EVERSTEP_LOG_FORMAT", "xml")
    with pytest.raises(SystemExit):
        settings(arguments(tmp_path))
    assert "EVERSTEP_LOG_FORMAT 'xml' is not one of text, json" in capsys.readouterr().err


def test_an_environment_file_of_an_earlier_agent_still_starts_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier agents had an option for the transport of replicas. `AGENT_OPTIONS` on a node may still contain it."""
    now = settings(arguments(tmp_path))
    for value in ("auto", "tcp", "nixl"):
        monkeypatch.setenv("EVERSTEP_REPLICA_TRANSPORT", value)
        assert settings([*arguments(tmp_path), "--replica-transport", value]) == now


def test_a_job_has_the_limits_of_the_options_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tmp_path)
    assert settings(given).job_limits == JobLimits()
    assert settings([*given, "--job-memory-bytes", "4096", "--job-tasks", "9"]).job_limits == JobLimits(4096, 9)
    monkeypatch.setenv("EVERSTEP_JOB_MEMORY_BYTES", "8192")
    monkeypatch.setenv("EVERSTEP_JOB_TASKS", "7")
    assert settings(given).job_limits == JobLimits(8192, 7)
    with pytest.raises(SystemExit):
        settings([*given, "--job-tasks", "0"])
    assert "--job-tasks 0 is below 1: a job needs some, or leave the option out" in capsys.readouterr().err


def test_who_ranks_run_as_is_said_or_follows_from_who_the_agent_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert settings([*arguments(tmp_path), "--rank-user", "7000:8000"]).rank_user == RankUser(7000, 8000)
    assert settings([*arguments(tmp_path), "--rank-user", "0"]).rank_user is None
    assert settings(arguments(tmp_path)).rank_user is not None
    monkeypatch.setenv("EVERSTEP_RANK_USER", "0")
    assert settings(arguments(tmp_path)).rank_user is None
    with pytest.raises(SystemExit):
        settings([*arguments(tmp_path), "--rank-user", "no such user"])
    assert "--rank-user: the user no such user does not exist" in capsys.readouterr().err


def test_an_agent_that_its_ranks_could_not_use_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = RankUser(os.getuid(), os.getgid())
    chosen = replace(settings(arguments(tmp_path / "state")), rank_user=user, sockets=tmp_path / "sockets")
    monkeypatch.setattr(rank_user, "closed_to", lambda user, paths: "/closed/python")
    with pytest.raises(SystemExit, match=r"who cannot use /closed/python: .*--rank-user root runs ranks as this agent"):
        confine(chosen)


@pytest.mark.parametrize(
    ("has_user", "endpoint", "reason", "words"),
    [
        (False, None, "", "ranks run as the agent's user: a job's code can read the agent's files"),
        (False, EC2_ENDPOINT, "", "the agent's files, and ask the instance's metadata for the keys of its role"),
        (
            True,
            EC2_ENDPOINT,
            "no ip here",
            "ranks can reach this instance's metadata, and with it the keys of its role: no ip here",
        ),
        (True, EC2_ENDPOINT, "", ""),
        (
            True,
            "http://127.0.0.9:80",
            "",
            "the keys of its role: http://127.0.0.9:80 is not an EC2 metadata address, so no rule covers it",
        ),
        (True, None, "", ""),
    ],
)
def test_what_does_not_keep_ranks_apart_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_user: bool, endpoint: str | None, reason: str, words: str
) -> None:
    user = RankUser(os.getuid(), os.getgid()) if has_user else None
    chosen = replace(
        settings(arguments(tmp_path / "state")),
        rank_user=user,
        sockets=tmp_path / "sockets",
        metadata_endpoint=endpoint,
    )
    monkeypatch.setattr(rank_user, "closed_to", lambda user, paths: "")
    monkeypatch.setattr(metadata_rule, "keep_away", lambda user: reason)
    assert confine(chosen).endswith(words)
    assert bool(confine(chosen)) is bool(words)


def test_as_many_files_may_be_opened_as_the_service_is_allowed() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] // 2, before[1]))
    try:
        allow_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_on_ec2_the_metadata_names_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image of a node holds no identity, so that an instance of the image never takes itself for that node."""
    for name in ("EVERSTEP_INSTANCE_ID", "EVERSTEP_ADDRESS", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    options = ["--control-plane-url", "http://127.0.0.1:1", "--state-dir", str(tmp_path), "--memory-bytes", "1000"]
    join = ["--fleet", "main", "--server-id", "0" * 32]
    with served() as service:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
        service.says = {"instance-id": "i-7", "local-ipv4": "10.0.0.7", "placement/region": "eu-west-1"}
        found = settings([*options, *join])
        assert (found.node_id, found.address) == ("i-7", "10.0.0.7")
        assert found.claim is not None
        assert (found.claim.node_id, found.claim.region) == ("i-7", "eu-west-1")
        assert settings([*options, "--address", "10.0.0.8"]).address == "10.0.0.8"
        service.status = 503
        with pytest.raises(SystemExit):
            settings(options)
        assert "its default is unavailable: the instance's metadata service" in capsys.readouterr().err

"""Tests where a server on AWS finds its region, and its error message if no source names a region."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.__main__ import EXIT_REFUSED, main
from control_plane.cloud.connection import CloudMode, CloudSettings, Connection
from control_plane.cloud.errors import RegionUnknown
from control_plane.cloud.region import find_region
from tests import instance_metadata
from tests.instance_metadata import Service

ZONE_PATH = "placement/availability-zone/"


@pytest.fixture(autouse=True)
def metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Service]:
    """Yield a metadata service of an instance in eu-north-1, in an environment that names no region."""
    for name in ("EVERSTEP_AWS_REGION", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with instance_metadata.served() as service:
        service.says[ZONE_PATH] = "eu-north-1b"
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
        yield service


def test_the_sources_of_the_region_have_an_order(
    metadata: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert find_region() == "eu-north-1"
    (tmp_path / "config").write_text("[default]\nregion = ap-south-1\n")
    assert find_region() == "ap-south-1"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-gov-west-1")
    assert find_region() == "us-gov-west-1"
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert find_region() == "eu-west-1"


def test_the_region_of_a_local_zone_is_that_of_its_parent(metadata: Service) -> None:
    metadata.says[ZONE_PATH] = "us-west-2-lax-1a"
    assert find_region() == "us-west-2"


def test_without_any_source_the_server_does_not_start_and_says_what_to_set(
    metadata: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(RegionUnknown, match=r"set AWS_REGION, pass --region, .* ~/\.aws/config"):
        find_region()
    with caplog.at_level(logging.ERROR):
        assert main(["--mode", "aws", "--bucket", "b", "--state-dir", str(tmp_path / "state")]) == EXIT_REFUSED
    assert "not started: the AWS region is unknown: set AWS_REGION" in caplog.text
    assert not (tmp_path / "state").exists()


def test_a_value_that_is_no_region_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "Frankfurt")
    with pytest.raises(RegionUnknown, match="'Frankfurt' is not an AWS region"):
        find_region()


def test_a_connection_to_aws_assumes_no_region() -> None:
    with pytest.raises(RegionUnknown):
        Connection(CloudSettings(mode=CloudMode.AWS))

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.__main__ import main
from control_plane.cloud.connection import CloudMode
from control_plane.core.timeouts import ladder
from control_plane.db.retention import RowRetention
from control_plane.errors import InvalidTimeouts
from control_plane.settings import InvalidSettings, Settings


def settings(**changes) -> Settings:
    values = {
        "state_directory": Path("/nowhere"),
        "bucket": "b",
        "mode": CloudMode.LOCAL,
        "aws_endpoint_url": "http://127.0.0.1:1",
    }
    return Settings(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0 can be reached from other machines"),
        ({"host": "everstep.example"}, "can be reached from other machines"),
        ({"aws_endpoint_url": "http://10.0.0.1:1"}, "local mode needs --aws-endpoint-url on this machine"),
        ({"aws_endpoint_url": "https://sts.amazonaws.com"}, "local mode needs --aws-endpoint-url on this machine"),
        ({"aws_endpoint_url": "http://["}, "local mode needs --aws-endpoint-url on this machine"),
        ({"aws_endpoint_url": "http://[", "mode": CloudMode.AWS}, "is not an http or https URL"),
        ({"aws_endpoint_url": None}, "local mode needs --aws-endpoint-url on this machine"),
        ({"aws_s3_endpoint_url": "http://10.0.0.1:1"}, "local mode needs --aws-s3-endpoint-url on this machine"),
        (
            {"aws_s3_endpoint_url": "10.0.0.1", "mode": CloudMode.AWS, "region": "us-east-1"},
            "--aws-s3-endpoint-url '10.0.0.1' is not an http or https URL",
        ),
        ({"aws_endpoint_url": None, "mode": CloudMode.AWS}, "needs a region: --region or AWS_REGION"),
        ({"bucket": ""}, "a bucket is needed"),
        ({"port": 65536}, "--port 65536 is not a port"),
        ({"retention": RowRetention(events=0)}, "--keep events=0: the minimum is 1"),
        ({"server_secret": "ab" * 31}, "EVERSTEP_SERVER_SECRET does not consist of 64 hexadecimal digits"),
        ({"admin_token": "geheim"}, "EVERSTEP_ADMIN_TOKEN is not est_ and at least 32 letters"),
        ({"event_exports": ("ops",)}, "'ops' is not the ARN of an EventBridge bus"),
        ({"event_exports": ("arn:aws:sqs:us-east-1:123456789012:q",)}, "is not the ARN of an EventBridge bus"),
        (
            {"event_exports": ("arn:aws:events:eu-west-1:123456789012:event-bus/ops",)},
            "is in eu-west-1, this server in us-east-1",
        ),
        (
            {"event_exports": ("arn:aws:events:us-east-1:123456789012:event-bus/ops",) * 2},
            "contains the same ARN twice",
        ),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_opened(changes, words):
    with pytest.raises(InvalidSettings, match=words):
        settings(**changes)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machine_is_fine(host):
    assert settings(host=host).host == host


def test_another_host_may_be_allowed():
    assert settings(host="0.0.0.0", is_other_host_allowed=True).host == "0.0.0.0"


def test_the_database_is_in_the_state_directory_unless_said():
    assert settings().database == "sqlite:////nowhere/everstep.db"
    assert settings(database_url="postgresql://db/everstep").database == "postgresql://db/everstep"


def test_a_detection_time_that_is_none_is_refused():
    with pytest.raises(InvalidTimeouts, match="detection_seconds is 0"):
        ladder(0)


@pytest.mark.parametrize(
    ("given", "code"), [("events=30", 0), ("events=0", 2), ("events=", 2), ("events=-1", 2), ("everything=1", 2)]
)
def test_how_long_things_are_kept_is_said_on_the_command_line(tmp_path, given, code):
    local = [
        "--mode",
        "local",
        "--aws-endpoint-url",
        "http://127.0.0.1:1",
        "--bucket",
        "b",
        "--state-dir",
        str(tmp_path),
    ]
    assert main([*local, "--keep", given, "--print-timeouts"]) == code


def test_settings_do_not_show_secrets():
    shown = repr(settings(server_secret="ab" * 32, admin_token="est_" + "c" * 40))
    assert "ab" * 32 not in shown
    assert "c" * 40 not in shown

"""The event sink over boto3 against moto. The tests receive the events through an SQS queue behind the bus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from control_plane.cloud.connection import Connection
from control_plane.cloud.errors import CloudError
from control_plane.cloud.sinks import ARN, EventBusSink, SinkEntry
from tests.unit.local_cloud.served import ServedAws, served_aws

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as aws:
        yield aws


@pytest.fixture
def connection(served: ServedAws) -> Connection:
    return served.connection()


def entries(*jobs: str) -> list[SinkEntry]:
    return [
        SinkEntry(event_id=n, at=NOW, type="JobStateChanged", subject=job, detail=json.dumps({"EventId": n}))
        for n, job in enumerate(jobs, start=1)
    ]


def queue(connection: Connection, name: str, **attributes: str) -> tuple[str, str]:
    sqs = connection.client("sqs")
    url = sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
    return url, sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]


def bodies(connection: Connection, url: str) -> list[dict[str, Any]]:
    answer = connection.client("sqs").receive_message(QueueUrl=url, MaxNumberOfMessages=10, VisibilityTimeout=0)
    return [json.loads(message["Body"]) for message in answer.get("Messages", [])]


def test_a_bus_takes_events_with_their_source_type_and_job(connection: Connection) -> None:
    bridge = connection.client("events")
    arn = bridge.create_event_bus(Name="ops")["EventBusArn"]
    url, queue_arn = queue(connection, "of-the-bus")
    bridge.put_rule(Name="all", EventBusName="ops", EventPattern=json.dumps({"source": ["everstep"]}))
    bridge.put_targets(Rule="all", EventBusName="ops", Targets=[{"Id": "1", "Arn": queue_arn}])
    sink = EventBusSink(connection, arn)
    assert sink.put(entries("a", "b")) is None
    found = bodies(connection, url)
    assert [(each["source"], each["detail-type"], each["resources"], each["detail"]) for each in found] == [
        ("everstep", "JobStateChanged", ["a"], {"EventId": 1}),
        ("everstep", "JobStateChanged", ["b"], {"EventId": 2}),
    ]


def test_a_bus_that_does_not_exist_is_an_error_or_a_refusal(connection: Connection) -> None:
    arn = "arn:aws:events:us-east-1:123456789012:event-bus/nowhere"
    refusal: CloudError | None = None
    try:
        refusal = EventBusSink(connection, arn).put(entries("a"))
    except CloudError as error:
        refusal = error
    assert refusal is not None


@pytest.mark.parametrize(
    ("arn", "is_one"),
    [
        ("arn:aws:sns:eu-west-1:123456789012:ops", False),
        ("arn:aws-us-gov:events:us-gov-west-1:123456789012:event-bus/default", True),
        ("arn:aws:sqs:eu-west-1:123456789012:queue", False),
        ("arn:aws:events:eu-west-1:12:event-bus/ops", False),
        ("ops", False),
    ],
)
def test_what_an_export_may_be_sent_to(arn: str, is_one: bool) -> None:
    assert (ARN.fullmatch(arn) is not None) is is_one

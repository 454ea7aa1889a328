"""The event queue over boto3, against moto's SQS. SQS delivers a message again until the message is deleted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from control_plane.cloud.connection import Connection
from control_plane.cloud.errors import CloudError
from control_plane.cloud.notices import SqsQueue, parse
from tests.unit.control_plane.cloud import aws_events
from tests.unit.local_cloud.served import ServedAws, served_aws


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as aws:
        yield aws


@pytest.fixture
def connection(served: ServedAws) -> Connection:
    return served.connection()


def test_a_message_is_delivered_until_it_is_deleted(served: ServedAws, connection: Connection) -> None:
    sqs = connection.client("sqs")
    url = sqs.create_queue(QueueName="events", Attributes={"VisibilityTimeout": "0"})["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody=aws_events.spot())
    queue = SqsQueue(connection, url)
    (first,), (again,) = queue.receive(), queue.receive()
    assert parse(again.body) == parse(aws_events.spot())
    assert (first.message_id, first.delivery_count, again.delivery_count) == (again.message_id, 1, 2)
    queue.delete([again.receipt])
    queue.delete([])
    assert queue.receive() == ()


def test_what_goes_wrong_is_a_cloud_error(served: ServedAws, connection: Connection) -> None:
    with pytest.raises(CloudError):
        SqsQueue(connection, f"{served.url}/123456789012/nowhere").receive()

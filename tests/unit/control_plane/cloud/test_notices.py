from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.cloud.errors import MalformedEvent
from control_plane.cloud.notices import parse
from everstep.protocol.agent_messages import NoticeKind
from tests.unit.control_plane.cloud import aws_events
from tests.unit.control_plane.cloud.aws_events import NODE

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def test_a_spot_interruption_comes_two_minutes_after_its_warning():
    event = parse(aws_events.spot())
    assert event is not None
    assert (event.kind, event.instance_ids, event.ends_at) == (
        NoticeKind.SPOT_INTERRUPTION,
        (NODE,),
        NOON.replace(minute=2),
    )
    assert event.message == "EC2 Spot Instance Interruption Warning at 2026-03-01 12:02:00 UTC"
    assert event.event_id == "12345678-1234-1234-1234-123456789012"


def test_a_rebalance_recommendation_has_no_time():
    event = parse(aws_events.rebalance())
    assert event is not None
    assert (event.kind, event.instance_ids, event.ends_at) == (NoticeKind.REBALANCE, (NODE,), None)


def test_instances_of_a_capacity_block_go_half_an_hour_before_its_end():
    event = parse(aws_events.block_end())
    assert event is not None
    assert (event.kind, event.instance_ids, event.capacity_reservation_id) == (
        NoticeKind.CAPACITY_BLOCK_END,
        (),
        "cr-1",
    )
    assert event.ends_at == NOON.replace(minute=10)
    assert event.event_id == "cr-1-approaching-expiry"


@pytest.mark.parametrize(
    "body",
    [
        aws_events.state_change(),
        aws_events.lifecycle(),
        aws_events.lifecycle("launch"),
        aws_events.scaling("Terminate", "Successful", NODE),
    ],
)
def test_what_can_be_asked_for_is_a_hint_about_an_instance(body):
    event = parse(body)
    assert event is not None
    assert (event.kind, event.instance_ids, event.is_scheduled_change) == (None, (NODE,), False)


def test_a_launch_that_failed_names_no_instance():
    event = parse(aws_events.scaling())
    assert event is not None
    assert (event.kind, event.instance_ids, event.group) == (None, (), "my-asg")


def test_health_says_that_something_is_scheduled():
    event = parse(aws_events.health())
    assert event is not None
    assert (event.kind, event.instance_ids, event.is_scheduled_change) == (None, (NODE,), True)
    assert parse(aws_events.health("issue")) is None


def test_strangers_are_told_from_malformed_ones():
    assert parse(aws_events.envelope("Object Created", {}, source="aws.s3")) is None
    assert parse(aws_events.envelope("EC2 Something New", {"instance-id": NODE})) is None
    assert parse(aws_events.spot().replace("aws.ec2", "acme.ec2")) is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no 'detail-type'"),
        (" " * 300_000, "300000 characters"),
        (aws_events.spot().replace(NODE, "../../etc"), "not an instance id"),
        (aws_events.spot().replace('"instance-id"', '"instance"'), "no 'instance-id'"),
        (aws_events.spot().replace("2026-03-01T12:00:00Z", "soon"), "'soon' is not a time"),
        (aws_events.block_end(end="0001-01-01T00:00:00+23:00"), "is not a time"),
        (json.dumps({**json.loads(aws_events.spot()), "detail": []}), "detail is not a JSON object"),
        (json.dumps({**json.loads(aws_events.spot()), "id": "x" * 256}), "no 'id'"),
    ],
)
def test_malformed_messages_say_what_is_wrong(body, words):
    with pytest.raises(MalformedEvent, match=words):
        parse(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.data())
def test_no_message_raises_anything_else(data):
    event = json.loads(
        data.draw(
            st.sampled_from([aws_events.spot(), aws_events.block_end(), aws_events.health(), aws_events.lifecycle()])
        )
    )
    where = data.draw(st.sampled_from([event, event["detail"]]))
    where[data.draw(st.sampled_from(sorted(where)))] = data.draw(JSON)
    with contextlib.suppress(MalformedEvent):
        parse(json.dumps(event))

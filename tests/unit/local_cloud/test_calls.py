"""The record of calls keeps changes, refused ones too, with the caller's application id."""

from __future__ import annotations

import pytest

from infra.local_cloud.calls import CallRecord

BOTOCORE = "Boto3/1.44.5 md/Botocore#1.44.5 lang/python#3.11.7 app/everstep-host-12 Botocore/1.44.5 everstep"


@pytest.mark.parametrize(
    ("user_agent", "caller"),
    [(BOTOCORE, "everstep-host-12"), ("app/first", "first"), ("Boto3/1.44.5 webapp/second", ""), ("", "")],
)
def test_a_call_names_the_application_that_made_it(user_agent: str, caller: str) -> None:
    record = CallRecord()
    record.add("autoscaling", b"Action=SetDesiredCapacity&DesiredCapacity=3", "400 Bad Request", 1.0, user_agent)
    (call,) = record.every()
    assert (call.caller, call.status, call.parameters) == (caller, 400, {"DesiredCapacity": "3"})


def test_the_record_has_no_calls_that_only_read() -> None:
    record = CallRecord()
    record.add("autoscaling", b"Action=DescribeAutoScalingGroups", "200 OK", 1.0, BOTOCORE)
    record.add("sqs", b"Action=SendMessage", "200 OK", 1.0, BOTOCORE)
    assert not record.every()

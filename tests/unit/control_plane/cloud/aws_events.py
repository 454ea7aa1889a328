"""Makes AWS events in their documented form, with the values that a test needs."""

from __future__ import annotations

import json
from typing import Any

NODE = "i-1234567890abcdef0"
TIME = "2026-03-01T12:00:00Z"


def envelope(
    detail_type: str,
    detail: dict[str, Any],
    *,
    source: str = "aws.ec2",
    event_id: str = "12345678-1234-1234-1234-123456789012",
) -> str:
    body = {
        "version": "0",
        "id": event_id,
        "detail-type": detail_type,
        "source": source,
        "account": "123456789012",
        "time": TIME,
        "region": "us-east-2",
        "resources": [f"arn:aws:ec2:us-east-2:123456789012:instance/{NODE}"],
        "detail": detail,
    }
    return json.dumps(body)


def spot(node: str = NODE, **more: str) -> str:
    return envelope(
        "EC2 Spot Instance Interruption Warning", {"instance-id": node, "instance-action": "terminate"}, **more
    )


def rebalance(node: str = NODE, **more: str) -> str:
    return envelope("EC2 Instance Rebalance Recommendation", {"instance-id": node}, **more)


def state_change(state: str = "terminated") -> str:
    return envelope("EC2 Instance State-change Notification", {"instance-id": NODE, "state": state})


def lifecycle(what: str = "terminate") -> str:
    detail = {
        "LifecycleActionToken": "87654321-4321-4321-4321-210987654321",
        "AutoScalingGroupName": "my-asg",
        "LifecycleHookName": "my-lifecycle-hook",
        "EC2InstanceId": NODE,
        "LifecycleTransition": f"autoscaling:EC2_INSTANCE_{what.upper()[:-1]}ING",
        "NotificationMetadata": "additional-info",
        "Origin": "AutoScalingGroup",
        "Destination": "EC2",
    }
    return envelope(f"EC2 Instance-{what} Lifecycle Action", detail, source="aws.autoscaling")


def scaling(what: str = "Launch", result: str = "Unsuccessful", node: str = "") -> str:
    detail = {
        "StatusCode": "Failed",
        "AutoScalingGroupName": "my-asg",
        "ActivityId": "87654321-4321-4321-4321-210987654321",
        "Details": {"Availability Zone": "us-west-2b"},
        "RequestId": "12345678-1234-1234-1234-123456789012",
        "StatusMessage": "message-text",
        "EndTime": TIME,
        "EC2InstanceId": node,
        "StartTime": TIME,
        "Cause": "description-text",
    }
    return envelope(f"EC2 Instance {what} {result}", detail, source="aws.autoscaling")


def block_end(reservation: str = "cr-1", end: str = "2026-03-01T12:40:00Z") -> str:
    """Return AWS's warning before the end of a Capacity Block.

    AWS documents two of its keys with underscores, unlike the keys of all other events.
    """
    body = {
        "customer_event_id": f"{reservation}-approaching-expiry",
        "detail_type": "Capacity Block Reservation Expiration Warning",
        "source": "aws.ec2",
        "account": "123456789012",
        "time": TIME,
        "resources": [f"arn:aws:ec2:us-east-2:123456789012:capacity-reservation/{reservation}"],
        "detail": {"capacity-reservation-id": reservation, "end-date": end},
    }
    return json.dumps(body)


def health(category: str = "scheduledChange") -> str:
    detail = {
        "eventArn": "arn:aws:health:us-west-2::event/EC2/AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED/"
        "AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED_1",
        "service": "EC2",
        "eventTypeCode": "AWS_EC2_PERSISTENT_INSTANCE_RETIREMENT_SCHEDULED",
        "eventTypeCategory": category,
        "startTime": "Sat, 05 Jun 2026 15:10:09 GMT",
        "eventDescription": [
            {"language": "en_US", "latestDescription": "A description of the event will be provided here"}
        ],
        "affectedEntities": [{"entityValue": NODE, "tags": {}}],
    }
    return envelope("AWS Health Event", detail, source="aws.health")

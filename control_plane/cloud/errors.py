"""Errors of the cloud.

    CloudError
    ├── Throttled            AWS asks to slow down                                   retryable
    ├── CloudUnavailable     no answer, a 5xx, or one that does not parse            retryable
    ├── ResourceContended    another change of the same resource is in progress      retryable
    ├── CapacityError        AWS has no instance of that type there, or a quota ends retryable
    ├── NotFound             the group, instance, bucket or object does not exist
    ├── PreconditionFailed   a conditional put lost: the object exists already
    ├── AccessDenied         the credentials may not do that
    ├── InvalidRequest       AWS says that the request itself is wrong
    ├── GroupNotOurs         an Auto Scaling group without the tag `everstep:fleet`
    ├── MalformedEvent       a message of the event queue that is no event
    ├── ContractViolation    a group that cannot be made to fit the ASG contract
    └── EndpointRefused      local mode, and an endpoint that is not on this machine

Whether a call is worth repeating is a property of the type, never of the place that made it.
"""

from __future__ import annotations

from typing import ClassVar


class CloudError(Exception):
    """Base of everything that a cloud call raises.

    Args:
        message: a sentence for the operator of the service, in AWS's words where AWS said something.
        code: AWS's error code, empty where AWS said nothing.
    """

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class Throttled(CloudError):
    """AWS asks to slow down."""

    retryable = True


class CloudUnavailable(CloudError):
    """No answer in time, an answer of the 5xx kind, or one that does not parse: nothing is known about the effect."""

    retryable = True


class ResourceContended(CloudError):
    """Another change of the same resource is in progress."""

    retryable = True


class CapacityError(CloudError):
    """AWS has no instance of that type in that zone, or an account limit is reached."""

    retryable = True


class NotFound(CloudError):
    """The group, instance, bucket or object does not exist."""


class PreconditionFailed(CloudError):
    """A conditional put lost: an object of that key exists already."""


class AccessDenied(CloudError):
    """The credentials are missing, expired or not allowed to do that."""


class InvalidRequest(CloudError):
    """AWS says that the request itself is wrong."""


class GroupNotOurs(CloudError):
    """The Auto Scaling group does not carry the tag that lets Everstep touch it."""


class MalformedEvent(CloudError):
    """A message of the event queue is not an event, or lacks what AWS documents of its kind."""


class ContractViolation(CloudError):
    """The Auto Scaling group cannot be made to fit the contract by Everstep; a person has to decide."""


class EndpointRefused(CloudError):
    """Local mode talks to this machine only."""

"""Errors of the cloud.

    CloudError
    ├── Throttled            AWS throttles the caller                                retryable
    ├── CloudUnavailable     no answer, or a 5xx                                     retryable
    │   └── GarbledAnswer    an answer that does not parse or contradicts another    retryable
    ├── ResourceContended    another change of the same resource is in progress      retryable
    ├── CapacityError        no free instance of the type, or an exhausted quota     retryable
    ├── ObjectTooLarge       an object exceeds the size that the caller reads
    ├── NotFound             the group, instance, bucket or object does not exist
    ├── ObjectChanged        another writer has written the object
    ├── AccessDenied         the credentials do not permit the call
    │   └── NoCredentials    no source has credentials yet
    ├── InvalidRequest       AWS rejected the request as invalid
    ├── GroupNotOurs         an Auto Scaling group without the tag `everstep:fleet`
    ├── MalformedEvent       a message of the event queue that is not a valid event
    ├── ContractViolation    only the owner of the group can make a setting fit Everstep's requirements
    ├── RegionUnknown        no source names the AWS region of this server
    └── EndpointRefused      local mode with an endpoint that is not on this machine

`retryable` states whether a caller may retry the call, `obstacle` why a read came to no result. A caller concludes
nothing from these errors, except from `NotFound` if the store proves that it answers (`objects.require_missing`).
"""

from __future__ import annotations

from typing import ClassVar

from everstep.protocol.agent_messages import Obstacle


class CloudError(Exception):
    """Base class of all errors of cloud calls. `code` is AWS's error code, empty without an answer from AWS."""

    retryable: ClassVar[bool] = False
    obstacle: ClassVar[Obstacle] = Obstacle.REFUSED

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class Throttled(CloudError):
    """AWS throttles the caller."""

    retryable = True
    obstacle = Obstacle.THROTTLED


class CloudUnavailable(CloudError):
    """AWS did not answer in time, answered with 5xx, or sent an unreadable answer. The call may have had an effect."""

    retryable = True
    obstacle = Obstacle.NO_ANSWER


class GarbledAnswer(CloudUnavailable):
    """An answer does not parse, ends too early, or contradicts another answer."""

    obstacle = Obstacle.GARBLED


class ResourceContended(CloudError):
    """AWS refuses the call, because another change of the same resource is in progress."""

    retryable = True


class CapacityError(CloudError):
    """AWS has no free instance of the requested type in the requested zone, or an account limit is reached."""

    retryable = True


class NotFound(CloudError):
    """The Auto Scaling group, instance, bucket or object does not exist."""

    obstacle = Obstacle.NO_BUCKET


class ObjectChanged(CloudError):
    """A conditional write failed: an S3 object exists that should not exist, or it has another ETag than expected."""


class AccessDenied(CloudError):
    """The credentials are missing, expired, or do not permit the call."""

    obstacle = Obstacle.DENIED


class NoCredentials(AccessDenied):
    """The server has no AWS credentials yet. It searches all sources of botocore again at its next call to AWS."""

    obstacle = Obstacle.NO_CREDENTIALS


class InvalidRequest(CloudError):
    """AWS rejected the request as invalid."""


class ObjectTooLarge(CloudError):
    """An object is larger than the caller reads. Its content does not come from Everstep, or is no small object."""


class GroupNotOurs(CloudError):
    """The Auto Scaling group lacks the tag that permits Everstep to change it."""


class MalformedEvent(CloudError):
    """A message of the event queue is no AWS event, or lacks fields that AWS documents."""


class ContractViolation(CloudError):
    """The Auto Scaling group lacks settings that a fleet requires and that only the group's owner can change."""


class RegionUnknown(CloudError):
    """Neither the settings nor the environment of the server name an AWS region."""


class EndpointRefused(CloudError):
    """Local mode refuses an endpoint outside this machine."""

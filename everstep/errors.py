"""Errors that the client and the command line raise, except the service's own errors.

    EverstepError                    message, hint
    ├── ConfigurationError           no endpoint, no token, or a token that would cross a network unencrypted
    ├── SourceRefused                a source directory that cannot be packed: it is empty or contains a link or device
    ├── NothingToDownload            a job without outputs
    ├── WaitFailed                   an awaited state cannot be reached any more
    ├── WaitTimedOut                 an awaited state was not reached in time                 retryable
    ├── ServiceFailed                an error or a missing response of the service, translated from boto3's errors
    ├── FileFailed                   the operating system failed to read or write a local file
    ├── TransferFailed               received bytes differ from the announced content         retryable
    └── CheckpointError              a checkpoint cannot be read or exported (`everstep.checkpoints.errors`)

If the service rejects a request, the client raises boto3's errors: `botocore.exceptions.ClientError`,
`client.exceptions.ValidationException` and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class FieldError:
    """An invalid field of a request, and the reason."""

    field: str
    message: str


class EverstepError(Exception):
    """Base of all errors that the client raises deliberately.

    Args:
        message: a sentence for the user.
        hint: the remedy. Empty if none is known.
    """

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigurationError(EverstepError):
    """The client lacks an endpoint or a token, or must not use the configured endpoint or token."""


class SourceRefused(EverstepError):
    """A source directory cannot be packed."""


class NothingToDownload(EverstepError):
    """A job, or its requested generation, has no outputs."""


class WaitFailed(EverstepError):
    """The state for which a waiter waits, such as Completed, cannot be reached any more."""


class WaitTimedOut(EverstepError):
    """The state for which a waiter waits was not reached in time. It may still be reached later."""

    retryable = True


class ServiceFailed(EverstepError):
    """The service returned an error or did not respond. Only `everstep.failures` raises it.

    Args:
        message: the service's description of the error.
        hint: the service's proposal how to correct the request; may be empty.
        code: the error type, for example `ValidationException`. Empty if unknown.
        request_id: identifies the request in the service's log.
        fields: the invalid fields of the request.
    """

    def __init__(
        self, message: str, *, hint: str = "", code: str = "", request_id: str = "", fields: Sequence[FieldError] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.request_id = request_id
        self.fields = tuple(fields)


class FileFailed(EverstepError):
    """The operating system failed to read or write a local file: no permission, no space, not a directory."""


class TransferFailed(EverstepError):
    """Received bytes differ from the announced content."""

    retryable = True

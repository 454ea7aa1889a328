"""Errors of the client and the command line that are not the service's.

EverstepError                    message, hint
├── ConfigurationError           no endpoint, no token, or a token that would cross a network in the clear
├── SourceRefused                a source directory that cannot be packed: a link, a device, nothing in it
├── NothingToDownload            a job left no outputs
├── WaitFailed                   what was waited for did not happen, and will not
├── WaitTimedOut                 what was waited for has not happened in time                 retryable
├── ServiceFailed                what the service answered, or that it did not: boto3's errors, for those who tell people
├── FileFailed                   the operating system refused a file of this machine
└── TransferFailed               bytes came that are not what was announced                  retryable

What the service refuses is raised as boto3 raises it: `botocore.exceptions.ClientError`, and
`client.exceptions.ValidationException` and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class FieldError:
    """What is wrong with one field of a request."""

    field: str
    message: str


class EverstepError(Exception):
    """Base of everything that the client raises on purpose.

    Args:
        message: a sentence for the user.
        hint: what to do about it; empty when there is nothing to say.
    """

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigurationError(EverstepError):
    """The client does not know whom to call, or must not call like this."""


class SourceRefused(EverstepError):
    """A source directory that cannot be packed."""


class NothingToDownload(EverstepError):
    """A job that left no outputs, or none of the generation that was asked for."""


class WaitFailed(EverstepError):
    """What was waited for did not happen, and will not."""


class WaitTimedOut(EverstepError):
    """What was waited for has not happened in time; it may yet."""

    retryable = True


class ServiceFailed(EverstepError):
    """What the service answered, or that it did not. Raised by `everstep.failures` alone.

    Args:
        message: the service's.
        hint: the service's.
        code: the error's type, as `ValidationException`; empty where it has none.
        request_id: under which the service's log has it.
        fields: what is wrong, field by field.
    """

    def __init__(
        self, message: str, *, hint: str = "", code: str = "", request_id: str = "", fields: Sequence[FieldError] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.request_id = request_id
        self.fields = tuple(fields)


class FileFailed(EverstepError):
    """The operating system refused to read or write a file of this machine: no permission, no space, not a directory."""


class TransferFailed(EverstepError):
    """Bytes came that are not what was announced."""

    retryable = True

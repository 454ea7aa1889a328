"""Errors of the client and the command line.

EverstepError                    message, hint, code, request_id, fields
├── ConfigurationError           no endpoint, no token, or a token that would cross a network in the clear
├── SourceRefused                a source directory that cannot be packed: a link, a device, nothing in it
├── WaitFailed                   a waiter's job ended another way, or the time was up
├── ServiceError                 what the service answered
│   ├── ValidationError          the request cannot be what was wanted; `fields` say where
│   │   └── RequestTooLarge
│   ├── Unauthorized             no token, or one that is not good
│   ├── AccessDenied             the token's role or project does not allow it
│   ├── NotFound                 there is no such thing
│   ├── Conflict                 the name is taken, or it is not in a state for that
│   ├── Throttled                too many requests                                           retryable
│   ├── ServiceUnavailable       nobody answers, or something behind the service does not    retryable
│   └── ServiceFault             the service failed
└── TransferFailed               bytes came that are not what was announced                  retryable
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


class WaitFailed(EverstepError):
    """What was waited for did not happen, and will not."""


class TransferFailed(EverstepError):
    """Bytes came that are not what was announced."""

    retryable = True


class ServiceError(EverstepError):
    """What the service answered.

    Args:
        message: the service's.
        hint: the service's.
        code: the error's type, as `ValidationException`.
        request_id: under which the service's log has it.
        fields: what is wrong, field by field.
    """

    def __init__(self, message: str, *, hint: str = "", code: str = "", request_id: str = "", fields: Sequence[FieldError] = ()) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.request_id = request_id
        self.fields = tuple(fields)


class ValidationError(ServiceError):
    """The request cannot be what was wanted."""


class RequestTooLarge(ValidationError):
    """The body is longer than the service takes."""


class Unauthorized(ServiceError):
    """No token, or one that is not good."""


class AccessDenied(ServiceError):
    """The token's role or project does not allow it."""


class NotFound(ServiceError):
    """There is no such thing."""


class Conflict(ServiceError):
    """The name is taken, or what it names is not in a state for that."""


class Throttled(ServiceError):
    """Too many requests."""

    retryable = True


class ServiceUnavailable(ServiceError):
    """Nobody answers, or something behind the service does not."""

    retryable = True


class ServiceFault(ServiceError):
    """The service failed; its log has the request id."""


BY_STATUS: dict[int, type[ServiceError]] = {
    400: ValidationError,
    401: Unauthorized,
    403: AccessDenied,
    404: NotFound,
    405: ValidationError,
    409: Conflict,
    413: RequestTooLarge,
    429: Throttled,
    502: ServiceUnavailable,
    503: ServiceUnavailable,
    504: ServiceUnavailable,
}
"""Which error an HTTP status is; any other is a `ServiceFault`."""

"""Defines the errors of the API and translates internal exceptions into them.

ApiError                            status  x-amzn-errortype
├── InvalidRequest                  400     ValidationException          Fields lists the errors
│   ├── MethodNotAllowed            405
│   ├── TooSlow                     408
│   └── TooLarge                    413
├── Forbidden                       403     AccessDeniedException
│   └── Unauthenticated             401
├── NotFound                        404     ResourceNotFoundException
├── InUse                           409     ConflictException
├── Throttled                       429     ThrottlingException          retryable
├── Unavailable                     503     ServiceUnavailableException  retryable
│   └── DiskFull
└── InternalError                   500     InternalServerException      the server's log has the request id
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from control_plane.api.schemas.common import ErrorResponse, FieldError
from control_plane.cloud.errors import AccessDenied, CloudError, EndpointRefused, RegionUnknown
from control_plane.cloud.errors import NotFound as CloudNotFound
from control_plane.db import errors as db
from control_plane.db.disk_watch import is_disk_full
from everstep.protocol import constraints

log = logging.getLogger(__name__)

MAX_FIELDS = 100
"""Largest number of fields per response, although a request can have thousands."""
_KINDS = {
    "int_": "integer",
    "float_": "double",
    "finite_number": "double",
    "bool_": "boolean",
    "string_type": "string",
    "datetime_": "timestamp",
    "timezone_": "timestamp",
    "list_type": "list",
    "dict_type": "map",
    "model_": "structure",
}
"""The API's name of a required type, by the prefix of pydantic's error type, such as `int_` of `int_type`."""


class ApiError(Exception):
    """The request failed. Base class of all errors that the API returns.

    Args:
        message: a sentence for the caller that contains the affected names and values.
        hint: how to correct the problem; may be empty.
        fields: one pair per invalid field: its path, and the problem. Only the first `MAX_FIELDS` are kept.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "InternalServerException"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "", fields: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.fields = tuple(FieldError(field=field, message=problem) for field, problem in islice(fields, MAX_FIELDS))


class InvalidRequest(ApiError):
    """The request is not valid. The response's member `Fields` lists the invalid fields."""

    status = 400
    code = "ValidationException"


def invalid(field: str, message: str, sentence: str = "The request is not valid: {field}: {message}") -> InvalidRequest:
    """Return the error for one invalid field. `sentence` is the template of the error's message."""
    return InvalidRequest(sentence.format(field=field, message=message), fields=[(field, message)])


class MethodNotAllowed(InvalidRequest):
    """The path exists, but not with this method."""

    status = 405


class TooSlow(InvalidRequest):
    """The client was too slow in sending the body of its request."""

    status = 408


class TooLarge(InvalidRequest):
    """The body of the request, or the source archive in it, is longer than allowed."""

    status = 413


class Forbidden(ApiError):
    """The request has no valid token, or the token's role or project does not allow the operation."""

    status = 403
    code = "AccessDeniedException"


class Unauthenticated(Forbidden):
    """The request has no token, or an invalid one."""

    status = 401


class NotFound(ApiError):
    """The resource does not exist, or the caller may not see it."""

    status = 404
    code = "ResourceNotFoundException"


class InUse(ApiError):
    """The name is taken, or the resource's state does not allow the operation."""

    status = 409
    code = "ConflictException"


class Throttled(ApiError):
    """Too many requests were sent, or too many requests of this kind are in progress. A later retry may succeed."""

    status = 429
    code = "ThrottlingException"
    retryable = True


class Unavailable(ApiError):
    """A dependency of the service did not answer. The same request may succeed later."""

    status = 503
    code = "ServiceUnavailableException"
    retryable = True


class DiskFull(Unavailable):
    """The server cannot write, because its own disk or the database's disk is full. Reads still work."""


class InternalError(ApiError):
    """The request failed inside the service. The service's log contains the request id."""


MODELED: tuple[type[ApiError], ...] = (
    InvalidRequest,
    Forbidden,
    NotFound,
    InUse,
    Throttled,
    InternalError,
    Unavailable,
)
"""One class per error type of the API, from which `control_plane.contract` generates the botocore model's errors."""


def install(app: FastAPI) -> None:
    """Register handlers for exceptions of the API, the database and the cloud."""
    for kind in (ApiError, db.DatabaseError, CloudError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _answer)


def translated(error: Exception) -> ApiError:
    """Return the API error for an exception of a route."""
    match error:
        case ApiError():
            return error
        case db.DatabaseError():
            return _from_database(error)
        case CloudError():
            return _from_cloud(error)
        case RequestValidationError():
            return from_validation(error)
        case HTTPException():
            return _from_http(error)
        case _:
            return unexpected(error)


def response(error: ApiError, request_id: str) -> JSONResponse:
    """Return the HTTP response for an error."""
    body = ErrorResponse(
        code=error.code, message=error.message, request_id=request_id, hint=error.hint, fields=list(error.fields)
    )
    headers = {"x-amzn-errortype": error.code}
    if error.retryable:
        headers["retry-after"] = "1"
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = 'Bearer realm="everstep"'
    return JSONResponse(body.model_dump(by_alias=True), status_code=error.status, headers=headers)


async def _answer(request: Request, error: Exception) -> JSONResponse:
    refusal = translated(error)
    if isinstance(refusal, InternalError):
        log.error("a request failed: %s", error)
    return response(refusal, request.state.request_id)


def _from_database(error: db.DatabaseError) -> ApiError:
    if isinstance(error, db.NotFound):
        return NotFound(f"There is no {error.noun} named {error.name!r}.")
    if isinstance(error, db.AlreadyExists):
        return InUse(
            f"There is already a {error.noun} named {error.name!r}.",
            hint="Choose another name, or delete the existing one first.",
        )
    if isinstance(error, db.Conflict | db.AmbiguousName):
        return InUse(_sentence(str(error)))
    if isinstance(error, db.TooMuch):
        return InvalidRequest(_sentence(str(error)), hint=f"Use {error.remedy}, or set Project or FleetName.")
    return _internal()


def unexpected(error: Exception) -> ApiError:
    """Return `DiskFull` if an unhandled exception reports a full disk or quota, else `InternalError`."""
    if is_disk_full(error):
        return DiskFull(
            "disk_full: a disk of the service is full, so the request was not stored.",
            hint="GetHealth names the directory. The operator of the service must free space or enlarge the disk. "
            "Training continues meanwhile. Retry afterwards.",
        )
    return _internal()


def _internal() -> InternalError:
    return InternalError(
        "The request failed inside the service.",
        hint="Give the RequestId to the operator of the service: its log contains the cause.",
    )


OF_SERVICE = (AccessDenied, RegionUnknown, EndpointRefused)
"""Errors that only the operator of the service can correct. No request is wrong because of them."""


def _from_cloud(error: CloudError) -> ApiError:
    if error.retryable or isinstance(error, OF_SERVICE):
        return Unavailable(f"The cloud did not complete the request: {error.message}", hint="Retry in a moment.")
    if isinstance(error, CloudNotFound):
        return NotFound(_sentence(error.message))
    return InvalidRequest(f"The cloud rejected the request: {error.message}")


def from_validation(error: RequestValidationError) -> ApiError:
    """Return the API error for a request that violates its model, with one entry per invalid field."""
    first = islice(error.errors(), MAX_FIELDS)
    fields = [(path, _words(path, entry)) for entry in first for path in [_path(entry["loc"])]]
    return InvalidRequest(constraints.summary(fields), fields=fields)


def _from_http(error: HTTPException) -> ApiError:
    if error.status_code == 404:
        return NotFound("There is no such operation.", hint="GET /v1/openapi.json lists all operations.")
    if error.status_code == 405:
        return MethodNotAllowed(
            "The path does not have this method.", hint="GET /v1/openapi.json lists all operations."
        )
    if error.status_code == 408:
        return TooSlow(_sentence(error.detail))
    if error.status_code == 413:
        return TooLarge(_sentence(error.detail))
    return (
        InvalidRequest(_sentence(error.detail)) if error.status_code < 500 else InternalError(_sentence(error.detail))
    )


def _path(location: tuple[int | str, ...]) -> str:
    """Return the field path `A.B[0]` of pydantic's location, without body, query, path or header."""
    parts = location[1:] if location and location[0] in ("body", "query", "path", "header") else location
    # pydantic appends "[key]" to the location of an invalid dictionary key, which the API's field paths omit.
    return constraints.path_of([part for part in parts if part != "[key]"])


def _words(path: str, entry: Mapping[str, Any]) -> str:
    """Convert a validation error of pydantic to a sentence, in the words of the SDK (`everstep.validation`)."""
    kind, given, context = str(entry["type"]), entry.get("input"), entry.get("ctx", {})
    match kind:
        case "missing":
            return constraints.MISSING
        case "extra_forbidden":
            return constraints.unknown(path)
        case "greater_than_equal":
            return constraints.at_least(context["ge"], given)
        case "less_than_equal":
            return constraints.at_most(context["le"], given)
        case "string_too_short":
            return constraints.too_short(context["min_length"])
        case "string_too_long":
            return constraints.too_long(context["max_length"])
        case "string_pattern_mismatch":
            return constraints.mismatch(context["pattern"], given)
        case "too_short":
            return constraints.too_few(context["min_length"])
        case "too_long":
            return constraints.too_many(context["max_length"])
        case "literal_error" | "enum":
            if not isinstance(given, str):
                return constraints.wrong_type("string", given)
            return constraints.none_of(re.findall(r"'([^']*)'", context["expected"]), given)
        case "json_invalid":
            return constraints.NOT_JSON
    expected = next((ours for theirs, ours in _KINDS.items() if kind.startswith(theirs)), None)
    return (
        f"{str(entry['msg'])[:1].lower()}{str(entry['msg'])[1:]}"
        if expected is None
        else constraints.wrong_type(expected, given)
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")

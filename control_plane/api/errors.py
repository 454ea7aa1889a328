"""Errors of the API: what a caller gets to see, and how anything else that is raised becomes one.

    ApiError                            status  x-amzn-errortype
    ├── InvalidRequest                  400     ValidationException          fields say what is wrong
    ├── Unauthenticated                 401     UnauthorizedException
    ├── Forbidden                       403     AccessDeniedException
    ├── NotFound                        404     ResourceNotFound
    ├── MethodNotAllowed                405     MethodNotAllowedException
    ├── InUse                           409     ResourceInUse
    ├── TooLarge                        413     RequestTooLargeException
    ├── Unavailable                     503     ServiceUnavailableException  retryable
    └── InternalError                   500     InternalServerException      the server's log has the request id

Invariant: every answer that is not a success has the same body, `schemas.ErrorResponse`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import ClassVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from control_plane.api.schemas import ErrorResponse, FieldError
from control_plane.cloud.errors import CloudError
from control_plane.cloud.errors import NotFound as CloudNotFound
from control_plane.db import errors as db

log = logging.getLogger(__name__)


class ApiError(Exception):
    """A request that is refused.

    Args:
        message: a sentence for the caller, with names and figures.
        hint: what to do about it.
        fields: what is wrong, field by field.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "InternalServerException"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "", fields: Iterable[FieldError] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.fields = tuple(fields)


class InvalidRequest(ApiError):
    """The request cannot be what the caller wants."""

    status = 400
    code = "ValidationException"


class Unauthenticated(ApiError):
    """No token, or one that is not good."""

    status = 401
    code = "UnauthorizedException"


class Forbidden(ApiError):
    """The token's role or project does not allow it."""

    status = 403
    code = "AccessDeniedException"


class NotFound(ApiError):
    """There is no such thing, or the caller may not know of it."""

    status = 404
    code = "ResourceNotFound"


class MethodNotAllowed(ApiError):
    """The path exists, the method does not."""

    status = 405
    code = "MethodNotAllowedException"


class InUse(ApiError):
    """The name is taken, or what it names is not in a state for that."""

    status = 409
    code = "ResourceInUse"


class TooLarge(ApiError):
    """The body is longer than allowed."""

    status = 413
    code = "RequestTooLargeException"


class Unavailable(ApiError):
    """Something that this server needs did not answer; the same request may succeed later."""

    status = 503
    code = "ServiceUnavailableException"
    retryable = True


class InternalError(ApiError):
    """A fault of ours."""


def install(app: FastAPI) -> None:
    """Make every refusal of the application answer in the one form."""
    for kind, translate in (
        (ApiError, lambda error: error),
        (db.DatabaseError, _from_database),
        (CloudError, _from_cloud),
        (RequestValidationError, _from_validation),
        (HTTPException, _from_http),
    ):
        app.add_exception_handler(kind, _Handler(translate))


def response(error: ApiError, request_id: str) -> JSONResponse:
    """Return the answer for an error."""
    body = ErrorResponse(code=error.code, message=error.message, request_id=request_id, hint=error.hint, fields=list(error.fields))
    headers = {"x-amzn-errortype": error.code}
    if error.retryable:
        headers["retry-after"] = "1"
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = 'Bearer realm="everstep"'
    return JSONResponse(body.model_dump(by_alias=True), status_code=error.status, headers=headers)


class _Handler:
    """Answers one kind of exception."""

    def __init__(self, translate: object) -> None:
        self._translate = translate

    async def __call__(self, request: Request, error: Exception) -> JSONResponse:
        assert callable(self._translate)
        refusal: ApiError = self._translate(error)
        return response(refusal, request.state.request_id)


def _from_database(error: db.DatabaseError) -> ApiError:
    if isinstance(error, db.NotFound):
        return NotFound(f"There is no {error.noun} named {error.name!r}.")
    if isinstance(error, db.AlreadyExists):
        return InUse(f"There is already a {error.noun} named {error.name!r}.", hint="Choose another name: names are not used again.")
    if isinstance(error, db.Conflict):
        return InUse(_sentence(str(error)))
    log.error("a request failed in the database: %s", error)
    return InternalError("The request failed inside the service.", hint="Give the RequestId to whoever runs the service: its log has the cause.")


def _from_cloud(error: CloudError) -> ApiError:
    if error.retryable:
        return Unavailable(f"The cloud did not do it: {error.message}", hint="Try again in a moment.")
    if isinstance(error, CloudNotFound):
        return NotFound(_sentence(error.message))
    return InvalidRequest(f"The cloud refused: {error.message}")


def _from_validation(error: RequestValidationError) -> ApiError:
    fields = [FieldError(field=_path(entry["loc"]), message=_words(entry)) for entry in error.errors()]
    told = "; ".join(f"{field.field}: {field.message}" if field.field else field.message for field in fields)
    return InvalidRequest(f"The request is not valid: {told}", fields=fields)


def _from_http(error: HTTPException) -> ApiError:
    if error.status_code == 404:
        return NotFound("There is no such operation.", hint="GET /v1/openapi.json lists all operations.")
    if error.status_code == 405:
        return MethodNotAllowed("The path does not have this method.", hint="GET /v1/openapi.json lists all operations.")
    if error.status_code == 413:
        return TooLarge(_sentence(error.detail))
    return InvalidRequest(_sentence(error.detail)) if error.status_code < 500 else InternalError(_sentence(error.detail))


def _path(location: tuple[int | str, ...]) -> str:
    """Return `A.B[0]` for a location that pydantic reports, without the part of the request that it is in."""
    parts = location[1:] if location and location[0] in ("body", "query", "path", "header") else location
    path = ""
    for part in parts:
        if part == "[key]":  # pydantic's mark for a dictionary's key
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.lstrip(".")


def _words(entry: dict[str, object]) -> str:
    message = str(entry["msg"])
    given = entry.get("input")
    if entry["type"] == "missing":
        return "is missing"
    if entry["type"] == "extra_forbidden":
        return "is not a field of this request"
    if isinstance(given, (str, int, float)) and not isinstance(given, bool):
        return f"{message[0].lower()}{message[1:]}, not {str(given)[:100]!r}"
    return f"{message[0].lower()}{message[1:]}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")

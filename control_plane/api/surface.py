"""Creates the FastAPI application with all routes, and its OpenAPI document, without a server's database or cloud.

FastAPI's document is corrected: all errors have one form, times are seconds since 1970, and fields without a value are
absent instead of null. `control_plane.contract` generates all other descriptions from it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from control_plane.api import auth, errors
from control_plane.api.auth import OPENAPI_PATH
from control_plane.api.event_stream import MEDIA_TYPE
from control_plane.api.routes import (
    agents,
    audit,
    automation,
    checkpoints,
    commands,
    deletions,
    drills,
    duties,
    events,
    fleets,
    health,
    incidents,
    job_lists,
    jobs,
    logs,
    metric_data,
    nodes,
    notes,
    quotas,
    reports,
    results,
    revisions,
    rolls,
    snapshots,
    sources,
    takeovers,
    tokens,
)
from control_plane.api.routes.events import EVENT_STREAM
from control_plane.api.schemas.common import ErrorResponse, FieldError
from control_plane.api.traffic import accepts_gzip
from control_plane.db.tokens import Role

Json = dict[str, Any]

API_VERSION: Final = "2026-01-01"
TITLE: Final = "Everstep"
DESCRIPTION: Final = "Trains large models on EC2 Auto Scaling groups and keeps every optimizer step in cluster memory."
EPOCH: Final = "epoch-seconds"
"""Format of times in the OpenAPI document: seconds since 1970, UTC."""
OPEN_OPERATIONS: Final = frozenset({"GetHealth", "GetReadiness"})
"""Operations that need no token."""
_OF_FASTAPI = ("HTTPValidationError", "ValidationError")
_GATES: Final = {auth.admin: Role.ADMIN.value, auth.user: Role.SUBMITTER.value, auth.reader: Role.VIEWER.value}
"""Lowest role by the authentication dependency of a route."""
ROOMS: Final = (
    jobs,
    job_lists,
    revisions,
    deletions,
    takeovers,
    commands,
    checkpoints,
    results,
    logs,
    metric_data,
    incidents,
    notes,
    events,
    fleets,
    rolls,
    nodes,
    drills,
    duties,
    reports,
    quotas,
    tokens,
    audit,
    automation,
    snapshots,
    sources,
    health,
    agents,
)
"""Modules that define routes."""


def make_surface(**options: Any) -> FastAPI:
    """Return an application with all routes, in whose state the caller stores `Services` at startup.

    `options` are FastAPI's, for example its lifespan.
    """
    app = FastAPI(
        title=TITLE,
        description=DESCRIPTION,
        version=API_VERSION,
        openapi_url=None,  # FastAPI would encode the document for each request
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
        routes=list(_routes()),
        **options,
    )
    errors.install(app)
    app.openapi = _document  # type: ignore[method-assign]  # FastAPI's documented way to replace the document
    app.add_route(OPENAPI_PATH, _answer_document, methods=["GET"])
    return app


async def _answer_document(request: Request) -> Response:
    is_packed = accepts_gzip(request.scope)
    headers = {"vary": "accept-encoding"} | ({"content-encoding": "gzip"} if is_packed else {})
    return Response(_document_bytes(is_packed=is_packed), headers=headers, media_type="application/json")


@cache
def _document_bytes(*, is_packed: bool) -> bytes:
    content = json.dumps(_document(), ensure_ascii=False, separators=(",", ":")).encode()
    return gzip.compress(content, mtime=0) if is_packed else content


@cache
def _routes() -> tuple[BaseRoute, ...]:
    # Cached, so that FastAPI analyzes the parameters only once.
    whole = APIRouter()
    for room in ROOMS:
        whole.include_router(room.router)
    return tuple(whole.routes)


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    """Yield path, method (in capitals) and description of every operation of an OpenAPI document."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method.upper(), operation


def least_roles() -> dict[str, str]:
    """Return the lowest role per operation. `none`: without a token."""
    found: dict[str, str] = {}
    for room in ROOMS:
        for route in room.router.routes:
            if isinstance(route, APIRoute) and route.operation_id is not None:
                asked = {dependency.call for dependency in route.dependant.dependencies}
                found[route.operation_id] = next((role for gate, role in _GATES.items() if gate in asked), "none")
    return found


def is_server_sent(operation: Json) -> bool:
    """Return whether an operation returns server-sent events, which botocore cannot read."""
    return any(EVENT_STREAM in answer.get("content", {}) for answer in operation["responses"].values())


@cache
def _document() -> Json:
    """Return the OpenAPI document, without the routes of `control_plane.app`. Cached; callers do not change it."""
    document: Json = get_openapi(
        title=TITLE,
        version=API_VERSION,
        description=DESCRIPTION,
        routes=_routes(),
        separate_input_output_schemas=False,
    )
    schemas: Json = document["components"]["schemas"]
    for name in _OF_FASTAPI:
        schemas.pop(name, None)
    for shape in (ErrorResponse, FieldError):
        described = shape.model_json_schema(ref_template="#/components/schemas/{model}")
        described.pop("$defs", None)
        schemas[shape.__name__] = described
    document["components"]["schemas"] = {name: _without_titles(_plain(schemas[name])) for name in sorted(schemas)}
    document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    for _, _, operation in operations(document):
        is_open = operation["operationId"] in OPEN_OPERATIONS
        operation["security"] = [] if is_open else [{"bearer": []}]
        operation.pop("summary", None)
        for answer in operation["responses"].values():
            # FastAPI derives response models for JSON only. The stream of log events has another media type.
            if MEDIA_TYPE in answer.get("content", {}):
                answer["content"] = {MEDIA_TYPE: answer["content"]["application/json"]}
        operation["parameters"] = [
            _without_nul(_without_titles(_plain(parameter))) for parameter in operation.get("parameters", [])
        ]
        operation["responses"] = {
            **{status: answer for status, answer in operation["responses"].items() if status.startswith("2")},
            **{status: {"$ref": f"#/components/responses/{status}"} for status in _error_answers(is_open)},
        }
    document["components"]["responses"] = _error_answers(is_open=False)
    return document


def _error_answers(is_open: bool) -> Json:
    descriptions: dict[int, list[str]] = {}
    for kind in _every(errors.ApiError):
        if "status" in vars(kind) and not (is_open and issubclass(kind, errors.Forbidden)):
            descriptions.setdefault(kind.status, []).append(f"`{kind.code}`: {(kind.__doc__ or '').strip()}")
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
    return {
        str(status): {"description": " ".join(words), "content": content}
        for status, words in sorted(descriptions.items())
    }


def _every(kind: type[errors.ApiError]) -> Iterator[type[errors.ApiError]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _every(inner)


def _without_nul(parameter: Json) -> Json:
    """Exclude NUL from a parameter's unrestricted text, as `deps` does."""
    schema = parameter["schema"]
    is_plain_text = schema.get("type") == "string" and not {"pattern", "enum", "format"} & set(schema)
    return {**parameter, "schema": {**schema, "pattern": r"^[^\x00]*$"}} if is_plain_text else parameter


def _plain(schema: Any) -> Any:
    """Return a JSON schema with times as numbers, and optional instead of nullable fields."""
    if isinstance(schema, list):
        return [_plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "date-time":
        return {**schema, "type": "number", "format": EPOCH}
    plain = {key: _plain(value) for key, value in schema.items()}
    # Callers pass only request parameters and JSON schemas, so a mapping with `schema` is a parameter.
    if "schema" in schema:
        plain["schema"] = _not_null(plain["schema"])
    if "properties" in schema:
        plain["properties"] = {name: _not_null(value) for name, value in plain["properties"].items()}
        required = [name for name in schema.get("required", []) if not _may_be_null(schema["properties"][name])]
        plain = {
            **{key: value for key, value in plain.items() if key != "required"},
            **({"required": required} if required else {}),
        }
    return plain


def _not_null(schema: Json) -> Json:
    if not _may_be_null(schema):
        return schema
    choices = [choice for choice in schema["anyOf"] if choice != {"type": "null"}]
    outer = {key: value for key, value in schema.items() if key != "anyOf" and not (key == "default" and value is None)}
    return {**(choices[0] if len(choices) == 1 else {"anyOf": choices}), **outer}


def _may_be_null(schema: Json) -> bool:
    return {"type": "null"} in schema.get("anyOf", [])


def _without_titles(schema: Any, *, is_fields: bool = False) -> Any:
    """Return a schema without pydantic's titles. If `is_fields`, a key `title` is a field and stays."""
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value, is_fields=key == "properties")
        for key, value in schema.items()
        if is_fields or key != "title"
    }

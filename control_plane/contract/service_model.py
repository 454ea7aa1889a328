"""Generator of the botocore service model from the OpenAPI document. Pure.

    OpenAPI                                 service-2.json
    operationId, path, method               operation, requestUri
    parameters and the body's fields        the members of the input shape `<Operation>Request`
    minimum, maxLength, maxItems, …         min, max
    pattern, enum, required                 the same
    format epoch-seconds                    timestamp
    an object without fields                document: any JSON
    format binary                           a streaming payload `Body`
    x-idempotency-token                     idempotencyToken: the client fills it in
    x-sensitive                             sensitive: not logged

Invariant: the module raises ContractError for a part of the document that botocore cannot express. It only skips
operations with server-sent events.
"""

from __future__ import annotations

import html
import json
from typing import Any, Final

from control_plane.api import errors
from control_plane.api.event_stream import MEDIA_TYPE
from control_plane.api.surface import API_VERSION, DESCRIPTION, EPOCH, OPEN_OPERATIONS, is_server_sent, operations
from control_plane.contract.errors import ContractError

Json = dict[str, Any]

LARGEST_INTEGER: Final = 2**31 - 1
"""A field with a larger maximum gets the type long."""
LOGGED_NUMBER: Final = "LoggedNumber"
"""Shape of numbers that may be NaN or infinite. The API sends these as text."""
_NOT_FINITE = [{"type": "number"}, {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}]
_PROSE = frozenset({"description", "default", "title", "examples"})
_SUPPORTED_KEYWORDS = {
    "string": frozenset(
        {"type", "minLength", "maxLength", "pattern", "enum", "const", "x-idempotency-token", "x-sensitive"}
    ),
    "integer": frozenset({"type", "minimum", "maximum"}),
    "number": frozenset({"type", "minimum", "maximum", "format"}),
    "boolean": frozenset({"type"}),
    "array": frozenset({"type", "items", "minItems", "maxItems"}),
    "object": frozenset(
        {
            "type",
            "additionalProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
            "x-sensitive",
        }
    ),
}
"""Keywords by JSON type. Any other keyword is a ContractError."""
_PLAIN_NAMES = {
    "string": "String",
    "integer": "Long",
    "double": "Double",
    "boolean": "Boolean",
    "timestamp": "Timestamp",
}


def service_model(document: Json) -> Json:
    """Return service-2.json of an OpenAPI document, sorted by names.

    Raises ContractError if it cannot express a part.
    """
    shapes = _Shapes(document["components"]["schemas"])
    described = {
        operation["operationId"]: _operation(shapes, path, method, operation)
        for path, method, operation in operations(document)
        if not is_server_sent(operation)
    }
    return {
        "version": "2.0",
        "metadata": {
            "apiVersion": API_VERSION,
            "auth": ["smithy.api#httpBearerAuth"],
            "endpointPrefix": "everstep",
            "jsonVersion": "1.1",
            "protocol": "rest-json",
            "protocols": ["rest-json"],
            "serviceFullName": "Everstep",
            "serviceId": "Everstep",
            "signatureVersion": "bearer",
            "signingName": "everstep",
            "uid": f"everstep-{API_VERSION}",
        },
        "operations": dict(sorted(described.items())),
        "shapes": dict(sorted(shapes.made.items())),
        "documentation": _prose(DESCRIPTION),
    }


def paginators(model: Json) -> Json:
    """Return paginators-1.json: every operation with a NextToken parameter.

    Raises ContractError if a paged response does not have exactly one list.
    """
    found = {}
    for name, operation in model["operations"].items():
        taken = model["shapes"][operation["input"]["shape"]]["members"] if "input" in operation else {}
        if "NextToken" not in taken:
            continue
        shape = model["shapes"][operation["output"]["shape"]]
        given = shape["members"]
        if given.keys() & {"NextForwardToken", "EventStream"}:
            continue  # Paginators can neither page backward nor read a stream, so such operations get no paginator.
        lists = [member for member, reference in given.items() if model["shapes"][reference["shape"]]["type"] == "list"]
        if len(lists) != 1 or "NextToken" not in given or "MaxResults" not in taken:
            raise ContractError(
                f"{name}: a paged operation takes NextToken and MaxResults, and answers NextToken and one list, "
                f"not {lists}"
            )
        found[name] = {
            "input_token": "NextToken",
            "limit_key": "MaxResults",
            "output_token": "NextToken",
            "result_key": lists[0],
        }
        # Without this key, botocore omits the other members from a result that it merges from several pages.
        if further := [member for member in shape.get("required", ()) if member not in {*lists, "NextToken"}]:
            found[name]["non_aggregate_keys"] = further
    return {"pagination": found}


def endpoint_rules() -> Json:
    """Return the content of endpoint-rule-set-1.json. Everstep has no default endpoint, so clients must set one."""
    message = (
        "Set endpoint_url, or AWS_ENDPOINT_URL_EVERSTEP: you run Everstep yourself, so it has no default endpoint."
    )
    use_endpoint = {
        "conditions": [{"fn": "isSet", "argv": [{"ref": "Endpoint"}]}],
        "endpoint": {"url": {"ref": "Endpoint"}, "properties": {}, "headers": {}},
        "type": "endpoint",
    }
    return {
        "version": "1.0",
        "parameters": {
            "Region": {"builtIn": "AWS::Region", "required": False, "documentation": "Not used.", "type": "String"},
            "UseDualStack": {
                "builtIn": "AWS::UseDualStack",
                "required": True,
                "default": False,
                "documentation": "Not used.",
                "type": "Boolean",
            },
            "UseFIPS": {
                "builtIn": "AWS::UseFIPS",
                "required": True,
                "default": False,
                "documentation": "Not used.",
                "type": "Boolean",
            },
            "Endpoint": {
                "builtIn": "SDK::Endpoint",
                "required": False,
                "documentation": "URL of the service.",
                "type": "String",
            },
        },
        "rules": [use_endpoint, {"conditions": [], "error": message, "type": "error"}],
    }


class _Shapes:
    """The model's shapes. A shape without a name in the OpenAPI document gets that of the field that first uses it."""

    def __init__(self, components: Json) -> None:
        self._components = components
        self.made: Json = {}
        for error in errors.MODELED:
            self._add_error(error)

    def structure(self, name: str) -> Json:
        """Return a reference to the structure of an OpenAPI component. The first call creates the structure."""
        if name not in self.made:
            component = self._components[name]
            if component.get("type") != "object" or "properties" not in component:
                raise ContractError(f"{name}: only objects with fields may be named schemas")
            made: Json = {"type": "structure", "members": {}}
            self.made[name] = made
            if "required" in component:
                made["required"] = sorted(component["required"])
            made["members"] = {
                field: self.member(name, field, schema) for field, schema in component["properties"].items()
            }
            made["documentation"] = _prose(component["description"])
        return {"shape": name}

    def member(self, owner: str, field: str, schema: Json) -> Json:
        """Return the member of a structure: a reference to the shape of its values, and its documentation."""
        reference = self._reference(f"{owner}.{field}", owner, field, schema)
        first, *others = schema.get("description", "").split("\n\n")
        if text := "\n\n".join([f"{first} {_default(schema)}".strip(), *others]):
            reference["documentation"] = _prose(text)
        if schema.get("x-idempotency-token"):
            reference["idempotencyToken"] = True
        return reference

    def _reference(self, where: str, owner: str, hint: str, schema: Json) -> Json:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            component = self._components[name]
            if component.get("type") == "object":
                return self.structure(name)
            self.made[name] = self._shape(name, owner, name, component)
            return {"shape": name}
        if "anyOf" in schema:
            if schema["anyOf"] != _NOT_FINITE:
                raise ContractError(f"{where}: a value is of one type")
            return self._named(LOGGED_NUMBER, {"type": "double"}, owner)
        if schema.keys() <= _PROSE:
            return self._named("Document", {"type": "structure", "members": {}, "document": True}, owner)
        unsupported_keywords = schema.keys() - _PROSE - _SUPPORTED_KEYWORDS.get(schema.get("type", ""), frozenset())
        if unsupported_keywords:
            raise ContractError(
                f"{where}: {', '.join(sorted(unsupported_keywords))} of {schema.get('type')!r} cannot be said in a "
                "service model"
            )
        shape = self._shape(where, owner, hint, schema)
        plain = _PLAIN_NAMES.get(shape["type"] if shape["type"] != "long" else "integer") if len(shape) == 1 else None
        return self._named(plain or ("Document" if shape.get("document") else hint), shape, owner)

    def _shape(self, where: str, owner: str, hint: str, schema: Json) -> Json:
        kind = schema["type"]
        if kind == "array":
            item = self._reference(f"{where}[]", owner, f"{hint}Item", schema["items"])
            return {"type": "list", "member": item, **_bounds(schema, "minItems", "maxItems")}
        if kind == "object":
            return self._map(where, owner, hint, schema)
        if kind == "string":
            allowed = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
            limits = _bounds(schema, "minLength", "maxLength")
            return {
                "type": "string",
                **limits,
                **_given(pattern=schema.get("pattern"), enum=allowed, sensitive=schema.get("x-sensitive")),
            }
        if kind == "integer":
            is_small = abs(schema.get("maximum", LARGEST_INTEGER + 1)) <= LARGEST_INTEGER
            return {
                "type": "integer" if is_small else "long",
                **{name: int(value) for name, value in _bounds(schema, "minimum", "maximum").items()},
            }
        if kind == "number":
            if schema.get("format") == EPOCH:
                return {"type": "timestamp"}
            return {"type": "double", **_bounds(schema, "minimum", "maximum")}
        return {"type": "boolean"}

    def _map(self, where: str, owner: str, hint: str, schema: Json) -> Json:
        values = schema.get("additionalProperties", {})
        keys = {"type": "string", **schema.get("propertyNames", {})}
        patterns = schema.get("patternProperties")
        if patterns is not None:
            if len(patterns) != 1:
                raise ContractError(f"{where}: a map has one pattern of keys")
            (pattern, values), *_ = patterns.items()
            keys["pattern"] = pattern
        if values in (True, {}):
            return {"type": "structure", "members": {}, "document": True}
        return {
            "type": "map",
            "key": self._reference(f"{where} (key)", owner, f"{hint}Key", keys),
            "value": self._reference(f"{where} (value)", owner, f"{hint}Value", values),
            **_bounds(schema, "minProperties", "maxProperties"),
            **_given(sensitive=schema.get("x-sensitive")),
        }

    def _named(self, name: str, shape: Json, owner: str) -> Json:
        for candidate in (name, f"{name}Reference", f"{owner}{name}"):
            if candidate not in self._components and self.made.setdefault(candidate, shape) == shape:
                return {"shape": candidate}
        raise ContractError(f"two shapes would be named {owner}{name}: {json.dumps(shape)}")

    def _add_error(self, error: type[errors.ApiError]) -> None:
        retry = {"retryable": {"throttling": error is errors.Throttled}} if error.retryable else {}
        members: Json = {
            "Message": self.member(
                error.code, "Message", {"type": "string", "description": "A sentence with names and figures."}
            ),
            "Hint": self.member(
                error.code,
                "Hint",
                {"type": "string", "description": "What to do about it; empty without advice."},
            ),
        }
        if error is errors.InvalidRequest:
            schema = {
                "type": "array",
                "items": {"$ref": "#/components/schemas/FieldError"},
                "description": "The invalid fields, one entry per field.",
            }
            members["Fields"] = self.member(error.code, "Fields", schema)
        self.made[error.code] = {
            "type": "structure",
            "members": members,
            "error": {"httpStatusCode": error.status, **({"senderFault": True} if error.status < 500 else {})},
            "exception": True,
            **({"fault": True} if error.status >= 500 else {}),
            **retry,
            "documentation": _prose((error.__doc__ or "").strip()),
        }


def _operation(shapes: _Shapes, path: str, method: str, operation: Json) -> Json:
    name = operation["operationId"]
    status, answer = next(
        (status, answer) for status, answer in operation["responses"].items() if status.startswith("2")
    )
    described: Json = {"name": name, "http": {"method": method, "requestUri": path, "responseCode": int(status)}}
    taken = _input(shapes, name, operation)
    if taken is not None:
        described["input"] = taken
    described["output"] = _output(shapes, name, answer)
    is_open = name in OPEN_OPERATIONS
    described["errors"] = [
        {"shape": error.code} for error in errors.MODELED if not (is_open and error is errors.Forbidden)
    ]
    described["documentation"] = _prose(operation["description"])
    if is_open:
        described["auth"] = ["smithy.api#noAuth"]
    return described


def _input(shapes: _Shapes, name: str, operation: Json) -> Json | None:
    members: Json = {}
    required: list[str] = []
    made: Json = {"type": "structure"}
    for parameter in operation["parameters"]:
        field = parameter["name"]
        described = {**parameter["schema"], **_given(description=parameter.get("description"))}
        location = {"path": "uri", "query": "querystring"}.get(parameter["in"])
        if location is None:
            raise ContractError(
                f"{name}.{field}: a parameter is part of the path or of the query, not of the {parameter['in']}"
            )
        members[field] = {
            **shapes.member(f"{name}Request", field, described),
            "location": location,
            "locationName": field,
        }
        if parameter.get("required"):
            required.append(field)
    body = operation.get("requestBody")
    if body is not None:
        (media_type, content), *_ = body["content"].items()
        if media_type == "application/json":
            reference = shapes.structure(content["schema"]["$ref"].rpartition("/")[2])
            if reference["shape"] != f"{name}Request":
                raise ContractError(f"{name}: its body is {reference['shape']}, which should be named {name}Request")
            own = shapes.made.pop(reference["shape"])
            twice = members.keys() & own["members"].keys()
            if twice:
                raise ContractError(f"{name}: {', '.join(sorted(twice))} is both a parameter and a field of the body")
            members |= own["members"]
            required += own.get("required", [])
            made["documentation"] = own["documentation"]
        else:
            members["Body"] = _blob(shapes)
            required.append("Body")
            made["payload"] = "Body"
    if not members:
        return None
    shapes.made[f"{name}Request"] = {**made, "members": members, **({"required": sorted(required)} if required else {})}
    return {"shape": f"{name}Request"}


def _output(shapes: _Shapes, name: str, answer: Json) -> Json:
    (media_type, content), *_ = answer["content"].items()
    if media_type == "application/json":
        return shapes.structure(content["schema"]["$ref"].rpartition("/")[2])
    if media_type == MEDIA_TYPE:
        return _event_stream(shapes, name, content["schema"]["$ref"].rpartition("/")[2])
    shapes.made[f"{name}Response"] = {"type": "structure", "members": {"Body": _blob(shapes)}, "payload": "Body"}
    return {"shape": f"{name}Response"}


def _event_stream(shapes: _Shapes, name: str, stream: str) -> Json:
    """Return the output shape of an event stream. Each field of the stream's schema becomes a type of event."""
    shapes.structure(stream)
    made = shapes.made[stream]
    made["eventstream"] = True
    for member in made["members"].values():
        shapes.made[member["shape"]]["event"] = True
    shapes.made[f"{name}Response"] = {
        "type": "structure",
        "members": {"EventStream": {"shape": stream}},
        "payload": "EventStream",
    }
    return {"shape": f"{name}Response"}


def _blob(shapes: _Shapes) -> Json:
    shapes.made["Content"] = {"type": "blob", "streaming": True}
    return {"shape": "Content"}


def _default(schema: Json) -> str:
    value = schema.get("default")
    return "" if value is None or isinstance(value, (dict, list)) else f"{json.dumps(value)} unless given."


def _bounds(schema: Json, low: str, high: str) -> Json:
    return _given(min=schema.get(low), max=schema.get(high))


def _given(**values: Any) -> Json:
    return {name: value for name, value in values.items() if value is not None}


def _prose(text: str) -> str:
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return "".join(f"<p>{html.escape(paragraph, quote=False)}</p>" for paragraph in paragraphs)

"""Tests the output of the contract generator for each construct, on small documents.

The generator raises an error for every construct that it does not support.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

import pytest

from control_plane.api.errors import MODELED
from control_plane.api.surface import make_surface
from control_plane.contract import tree
from control_plane.contract.errors import ContractError
from control_plane.contract.reference import pages
from control_plane.contract.service_model import endpoint_rules, paginators, service_model
from control_plane.contract.stubs import stubs
from control_plane.contract.typescript import typescript
from control_plane.contract.waiters import _check, waiters
from control_plane.core.checkpoints import CheckpointStatus, Verification
from control_plane.core.observed.drills import DrillKind, DrillState
from control_plane.core.observed.facts import NodeRequest
from control_plane.core.observed.fleets import Hold
from control_plane.core.observed.nodes import Cause, Remedy
from control_plane.core.states import (
    FleetStatus,
    IncidentPhase,
    JobState,
    NodeState,
    ProtectionState,
    SecondaryStatus,
    TrainingJobStatus,
)

Json = dict[str, Any]


def answer(schema: Json | None = None, media_type: str = "application/json") -> Json:
    return {
        "200": {
            "description": "",
            "content": {media_type: {"schema": schema or {"$ref": "#/components/schemas/Thing"}}},
        }
    }


def document(
    thing: Json | None = None, *, parameters: tuple[Json, ...] = (), body: Json | None = None, **more: Json
) -> Json:
    """Return a document with one operation, DescribeThing, whose response is a Thing with these fields."""
    fields = thing or {"Name": {"type": "string"}}
    described = {
        "type": "object",
        "properties": fields,
        "required": sorted(fields),
        "description": "A thing.",
        "additionalProperties": False,
    }
    operation: Json = {
        "operationId": "DescribeThing",
        "tags": ["Things"],
        "description": "Describe a thing.",
        "parameters": list(parameters),
        "responses": answer(),
    }
    if body is not None:
        operation["requestBody"] = {
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/DescribeThingRequest"}}}
        }
        more["DescribeThingRequest"] = {"type": "object", "properties": body, "description": "Which."}
    said = {
        "type": "object",
        "properties": {"Field": {"type": "string"}, "Message": {"type": "string"}},
        "description": "Wrong.",
    }
    return {
        "paths": {"/v1/things": {"get": operation}},
        "components": {"schemas": {"Thing": described, "FieldError": said, **more}},
    }


def shape_of(field: Json, **more: Json) -> Json:
    model = service_model(document({"Value": field}, **more))
    shape: Json = model["shapes"][model["shapes"]["Thing"]["members"]["Value"]["shape"]]
    return shape


@pytest.mark.parametrize(
    ("schema", "shape"),
    [
        ({"type": "string"}, {"type": "string"}),
        (
            {"type": "string", "minLength": 1, "maxLength": 9, "pattern": "^a$"},
            {"type": "string", "min": 1, "max": 9, "pattern": "^a$"},
        ),
        ({"type": "string", "enum": ["a", "b"]}, {"type": "string", "enum": ["a", "b"]}),
        ({"type": "string", "const": "a"}, {"type": "string", "enum": ["a"]}),
        ({"type": "integer", "minimum": 0.0, "maximum": 5.0}, {"type": "integer", "min": 0, "max": 5}),
        ({"type": "integer"}, {"type": "long"}),
        ({"type": "integer", "maximum": 2**31}, {"type": "long", "max": 2**31}),
        ({"type": "number", "minimum": 0.5}, {"type": "double", "min": 0.5}),
        ({"type": "number", "format": "epoch-seconds"}, {"type": "timestamp"}),
        ({"type": "boolean"}, {"type": "boolean"}),
        (
            {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            {"type": "list", "member": {"shape": "String"}, "max": 3},
        ),
        (
            {"type": "object", "additionalProperties": {"type": "number"}, "maxProperties": 2},
            {"type": "map", "key": {"shape": "String"}, "value": {"shape": "Double"}, "max": 2},
        ),
        ({"type": "object", "additionalProperties": True}, {"type": "structure", "members": {}, "document": True}),
        ({}, {"type": "structure", "members": {}, "document": True}),
    ],
)
def test_every_type_has_its_shape(schema, shape):
    assert shape_of(schema) == shape


def test_keys_of_a_map_keep_their_pattern():
    model = service_model(document({"Value": {"type": "object", "patternProperties": {"^k$": {"type": "string"}}}}))
    assert model["shapes"]["ValueKey"] == {"type": "string", "pattern": "^k$"}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "number", "exclusiveMinimum": 0}, "Thing.Value: exclusiveMinimum of 'number' cannot be said"),
        ({"type": "string", "format": "uri"}, "Thing.Value: format of 'string' cannot be said"),
        ({"type": "array", "items": {"type": "integer", "multipleOf": 2}}, r"Thing.Value\[\]: multipleOf"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "Thing.Value: a value is of one type"),
        ({"type": "object", "patternProperties": {"^a$": {}, "^b$": {}}}, "Thing.Value: a map has one pattern"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(schema, words):
    with pytest.raises(ContractError, match=words):
        service_model(document({"Value": schema}))


def test_parameters_and_body_are_one_request():
    name = {"name": "Name", "in": "path", "required": True, "schema": {"type": "string"}}
    model = service_model(document(parameters=(name,), body={"Token": {"type": "string", "x-idempotency-token": True}}))
    request = model["shapes"]["DescribeThingRequest"]
    assert request["members"]["Name"] == {"shape": "String", "location": "uri", "locationName": "Name"}
    assert request["members"]["Token"] == {"shape": "String", "idempotencyToken": True}
    assert request["required"] == ["Name"]


def test_what_no_log_may_show_is_said_of_its_shape():
    secrets = {
        "Secret": {"type": "string", "x-sensitive": True},
        "Keys": {"type": "object", "additionalProperties": {"type": "string"}, "x-sensitive": True},
    }
    shapes = service_model(document({**secrets, "Plain": {"type": "string"}}))["shapes"]
    assert (shapes["Secret"], shapes["Keys"]["sensitive"]) == ({"type": "string", "sensitive": True}, True)
    assert "sensitive" not in shapes["String"]


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (
            {"name": "X", "in": "header", "schema": {"type": "string"}},
            "DescribeThing.X: a parameter is part of the path or of the query",
        ),
        (
            {"name": "Token", "in": "query", "schema": {"type": "string"}},
            "DescribeThing: Token is both a parameter and a field of the body",
        ),
    ],
)
def test_a_request_that_no_client_could_make_is_refused(parameter, words):
    with pytest.raises(ContractError, match=words):
        service_model(document(parameters=(parameter,), body={"Token": {"type": "string"}}))


def test_a_body_is_named_after_its_operation():
    wrong = document(body={"Token": {"type": "string"}})
    wrong["paths"]["/v1/things"]["get"]["requestBody"]["content"]["application/json"]["schema"]["$ref"] = (
        "#/components/schemas/Thing"
    )
    with pytest.raises(ContractError, match="its body is Thing, which should be named DescribeThingRequest"):
        service_model(wrong)


def test_the_same_field_with_other_limits_is_another_shape():
    other = {"type": "object", "properties": {"Size": {"type": "integer", "maximum": 9}}, "description": "Another."}
    model = service_model(
        document(
            {"Size": {"type": "integer", "maximum": 5}, "Other": {"$ref": "#/components/schemas/Other"}}, Other=other
        )
    )
    sizes = {model["shapes"][name]["members"]["Size"]["shape"] for name in ("Thing", "Other")}
    assert sorted(model["shapes"][size]["max"] for size in sizes) == [5, 9]


def test_errors_are_typed_and_say_whether_to_try_again():
    shapes = service_model(document())["shapes"]
    assert {error.code for error in MODELED} == {name for name, shape in shapes.items() if shape.get("exception")}
    assert shapes["ThrottlingException"]["retryable"] == {"throttling": True}
    assert shapes["ServiceUnavailableException"]["retryable"] == {"throttling": False}
    assert "retryable" not in shapes["ConflictException"]
    assert shapes["ConflictException"]["error"] == {"httpStatusCode": 409, "senderFault": True}


def paged(output: Json, *names: str) -> Json:
    return document(
        output, parameters=tuple({"name": name, "in": "query", "schema": {"type": "string"}} for name in names)
    )


LIST = {"type": "array", "items": {"type": "string"}}


def test_what_takes_a_token_is_paged():
    model = service_model(paged({"Things": LIST, "NextToken": {"type": "string"}}, "NextToken", "MaxResults"))
    expected = {
        "input_token": "NextToken",
        "output_token": "NextToken",
        "limit_key": "MaxResults",
        "result_key": "Things",
    }
    assert paginators(model) == {"pagination": {"DescribeThing": expected}}
    assert paginators(service_model(document())) == {"pagination": {}}


@pytest.mark.parametrize(
    ("output", "names"),
    [
        ({"Things": LIST, "More": LIST, "NextToken": {"type": "string"}}, ("NextToken", "MaxResults")),
        ({"Things": LIST}, ("NextToken", "MaxResults")),
        ({"Things": LIST, "NextToken": {"type": "string"}}, ("NextToken",)),
    ],
)
def test_half_a_page_is_refused(output, names):
    with pytest.raises(ContractError, match="DescribeThing: a paged operation"):
        paginators(service_model(paged(output, *names)))


@pytest.mark.parametrize(
    ("waiter", "words"),
    [
        ({"operation": "None", "acceptors": []}, "which is no operation"),
        ({"operation": "DescribeThing", "acceptors": [{"argument": "Name == 'a' && Inner[].Gone"}]}, "looks at Inner"),
        ({"operation": "DescribeThing", "acceptors": [{"argument": "length(Gone) > `0`"}]}, "looks at Gone"),
        (
            {"operation": "DescribeThing", "acceptors": [{"argument": "Status", "expected": "ready"}]},
            "waits for Status to be 'ready', which it never is",
        ),
        (
            {
                "operation": "DescribeThing",
                "acceptors": [{"argument": "Name == 'a' && Status == 'ready'", "expected": True}],
            },
            "to be 'ready'",
        ),
    ],
)
def test_a_waiter_for_what_is_not_there_is_refused(waiter, words):
    thing = {"Name": {"type": "string"}, "Status": {"type": "string", "enum": ["Ready", "Gone"]}}
    with pytest.raises(ContractError, match=words):
        _check(service_model(document(thing)), "Ready", waiter)


def test_types_for_people_and_programs():
    thing = {
        "Name": {"type": "string", "enum": ["a", "b"], "description": "Its */ name."},
        "At": {"type": "number", "format": "epoch-seconds"},
        "Sizes": {"type": "object", "additionalProperties": {"type": "integer"}},
        "Maybe": LIST,
    }
    described = document(
        thing, parameters=({"name": "Id", "in": "query", "required": True, "schema": {"type": "string"}},)
    )
    described["components"]["schemas"]["Thing"]["required"] = ["Name", "At", "Sizes"]
    model = service_model(described)
    model["shapes"]["TrainingJob"] = {
        "type": "structure",
        "members": {"Name": {"shape": "String"}, "Id": {"shape": "String"}},
    }
    model["shapes"]["CreateTrainingJobRequest"] = {"type": "structure", "members": {"Name": {"shape": "String"}}}
    stub = stubs(model, {"pagination": {}}, {"waiters": {}})
    assert "def describe_thing(self, *, Id: str) -> Thing:" in stub
    for line in ('Name: Literal["a", "b"]', "At: datetime", "Sizes: dict[str, int]", "Maybe: NotRequired[list[str]]"):
        assert f"    {line}\n" in stub
    compile(stub, "service.pyi", "exec")
    script = typescript(model, {"DescribeThing": "admin"})
    for line in (
        "/** Its * / name. */",
        "Name: 'a' | 'b'",
        "At: Timestamp",
        "Sizes: Record<string, number>",
        "Maybe?: string[]",
    ):
        assert f"  {line}\n" in script
    assert "DescribeThing: { method: 'GET', path: '/v1/things', query: ['Id'], role: 'admin' }" in script
    reference = pages(described, model, {"pagination": {}}, {"waiters": {}})
    assert "| `Id` | string | Required. |" in reference["things.md"]
    assert "One of `a`, `b`." in reference["types.md"]


def test_no_endpoint_is_guessed():
    *_, last = endpoint_rules()["rules"]
    assert last["type"] == "error"


def test_what_was_changed_by_hand_is_stale_and_written_anew(tmp_path):
    tree.write(tmp_path)
    assert tree.stale(tmp_path) == []
    model = tmp_path / tree.MODEL / "service-2.json"
    before = model.read_text()
    model.write_text(json.dumps({}))
    (tmp_path / "docs/openapi.json").unlink()
    assert {path.name for path in tree.stale(tmp_path)} == {"service-2.json", "openapi.json"}
    tree.write(tmp_path)
    assert model.read_text() == before
    assert tree.stale(tmp_path) == []


STATUSES: dict[str, type[StrEnum]] = {
    "Checkpoint.Status": CheckpointStatus,
    "Checkpoint.Verification": Verification,
    "Drill.DrillStatus": DrillState,
    "Drill.DrillType": DrillKind,
    "Fleet.FleetStatus": FleetStatus,
    "Incident.Cause": Cause,
    "Incident.Phase": IncidentPhase,
    "Node.Hold": Hold,
    "Node.NodeStatus": NodeState,
    "Node.Request": NodeRequest,
    "NodeIncident.Remedy": Remedy,
    "SecondaryStatusTransition.State": JobState,
    "SecondaryStatusTransition.Status": SecondaryStatus,
    "TrainingJob.SecondaryStatus": SecondaryStatus,
    "TrainingJob.TrainingJobStatus": TrainingJobStatus,
    "TrainingJobSummary.ProtectionState": ProtectionState,
    "TrainingJobSummary.SecondaryStatus": SecondaryStatus,
}
PLAIN = {"NodeIncident.Cause"}
"""Status fields whose values are free text, because they may contain the code of a fault."""


def test_every_status_is_an_enumeration_of_the_cores_words():
    shapes = service_model(make_surface().openapi())["shapes"]
    told = {
        f"{name}.{field}": shapes[member["shape"]].get("enum")
        for name, shape in shapes.items()
        for field, member in shape.get("members", {}).items()
        if not shape.get("exception")
    }
    assert {where: told[where] for where in STATUSES} == {
        where: [each.value for each in kind] for where, kind in STATUSES.items()
    }
    named = [where for where in told if where.endswith(("Status", "State", ".Phase", ".Cause"))]
    assert [where for where in named if told[where] is None and where not in PLAIN] == []


def test_a_waiter_for_a_status_that_was_renamed_is_refused():
    document = make_surface().openapi()
    words = document["components"]["schemas"]["FleetStatus"]["enum"]
    renamed = {**document, "components": {**document["components"], "schemas": {**document["components"]["schemas"]}}}
    renamed["components"]["schemas"]["FleetStatus"] = {"type": "string", "enum": ["ready", *words[1:]]}
    with pytest.raises(ContractError, match="FleetReady waits for FleetStatus to be 'active', which it never is"):
        waiters(service_model(renamed))

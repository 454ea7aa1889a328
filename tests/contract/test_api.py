"""The API contract, tested with a client and a service: a boto3 client from the generated model calls the real
application on loopback.

`docs/openapi.json` and the service model are snapshots of the published contract. `python -m control_plane.contract`
rewrites them. A changed file changes the API for every caller.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ClientError, ParamValidationError, WaiterError
from botocore.stub import Stubber
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic import ValidationError as PydanticError

import everstep
from control_plane.api import errors
from control_plane.api.schemas import common as common_schemas
from control_plane.api.schemas import fleets as fleets_schemas
from control_plane.api.schemas import jobs as jobs_schemas
from control_plane.api.schemas import tokens as tokens_schemas
from control_plane.api.surface import ROOMS, is_server_sent, make_surface, operations
from control_plane.contract.names import python_name
from control_plane.contract.tree import ROOT, files, stale
from everstep import validation
from everstep.protocol.plan import ObjectReference
from everstep.sdk import SERVICE
from tests.unit.control_plane.api.conftest import BUCKET, GROUP, START, all_pages, without_metadata
from tests.unit.control_plane.api.test_snapshots import DATA as SNAPSHOT_DATA

MODEL = json.loads(files()[next(path for path in files() if path.name == "service-2.json")])
SOURCE_ID = "0" * 64


def calls(world: dict[str, Any]) -> dict[str, dict[str, Any]]:
    job = {"TrainingJobName": "gpt"}
    prefix = f"projects/default/jobs/gpt/run={world['job'].run}"
    new = {
        "TrainingJobName": "second",
        "Source": world["source"],
        "EntryPoint": "train.py",
        "NodeCount": 1,
        "FleetName": "main",
    }
    return {
        "AcknowledgeIncident": {"IncidentId": "inc-0", "Note": "seen"},
        "BatchGetLossCurves": {"RunIds": world["job"].run},
        "UpdateIncident": {"IncidentId": "inc-0", "Owner": "ann"},
        "CreateIncidentNote": {"IncidentId": "inc-0", "Text": "the switch"},
        "ListSimilarIncidents": {"IncidentId": "inc-0"},
        "ExportIncident": {"IncidentId": "inc-0", "Format": "markdown"},
        "CreateTrainingJobNote": {**job, "Text": "a baseline"},
        "ListTrainingJobNotes": job,
        "ExecuteCommand": {**job, "Rank": 0, "Command": ["true"]},
        "StartDrill": {**job, "DrillType": "kill-rank", "Rank": 1},
        "ListDrills": job,
        "DrainNode": {"NodeId": "i-3"},
        "HoldNode": {"NodeId": "i-4", "Reason": "a look"},
        "RebootNode": {"NodeId": "i-5"},
        "ReplaceNode": {"NodeId": "i-6"},
        "ResetNodeSession": {"NodeId": "i-6", "Reason": "a new disk"},
        "TakeOverTrainingJob": {**job, "Reason": "by hand"},
        "HandBackTrainingJob": job,
        "AcceptLoss": {**job, "FromStep": 4},
        "CreateFleet": {
            "FleetName": "other",
            "AutoScalingGroupName": "another",
            "PriceUsdPerHour": 98.32,
            "SparePolicy": {"Probability": 0.99},
        },
        "CreateJoinToken": {"FleetName": "main"},
        "CreateCheckpoint": job,
        "HoldSnapshot": {**job, "SnapshotId": f"1-8-{'0' * 32}"},
        "ReadSnapshot": {**job, "SnapshotId": f"1-8-{'0' * 32}", "Rank": 1, "Begin": 0, "End": 5},
        "ReleaseSnapshot": {**job, "SnapshotId": f"1-8-{'0' * 32}"},
        "CreateToken": {"Role": "viewer", "Project": "speech", "ExpiresInSeconds": 3600},
        "CreateTrainingJob": new,
        "VerifyCheckpoint": {**job, "Step": 8},
        "PinCheckpoint": {**job, "Step": 8},
        "UnpinCheckpoint": {**job, "Step": 8},
        "DeleteCheckpoint": {**job, "Step": 4, "Generation": 1},
        "UndeleteCheckpoint": {**job, "Step": 4, "Generation": 1},
        "DeleteFleet": {"FleetName": "other"},
        "DeleteTrainingJob": {"TrainingJobName": "ended"},
        "UndeleteTrainingJob": job,
        "DescribeCheckpoint": {**job, "Step": 8},
        "DescribeFleet": {"FleetName": "main"},
        "DescribeIncident": {"IncidentId": "inc-0"},
        "DescribeNode": {"NodeId": "i-0"},
        "DescribeProtection": job,
        "DescribeSource": world["source"],
        "DescribeTrainingJob": job,
        "GetCallerIdentity": {},
        "GetHealth": {},
        "GetReadiness": {},
        "FollowLogs": job,
        "GetLogEvents": {**job, "StartFromHead": True},
        "GetOutput": {**job, "Key": f"{prefix}/output/gen=1/rank=0/model.bin"},
        "ListCheckpoints": job,
        "ListEvents": {"MaxResults": 1},
        "ListFleets": {},
        "ListIncidents": job,
        "ListMetrics": job,
        "GetMetricData": job,
        "ListNodes": {"FleetName": "main", "IncludeEnded": True},
        "ListOutputs": job,
        "ListTokens": {"MaxResults": 1},
        "ListTrainingJobs": {"StatusEquals": "InProgress"},
        "PauseTrainingJob": job,
        "RehearseTrainingJob": job,
        "ReleaseNode": {"NodeId": "i-2", "Terminate": True},
        "RevokeToken": {"TokenId": world["token"]},
        "UnfreezeFleet": {"FleetName": "main"},
        "DescribeAutomation": {},
        "ListAuditEntries": {"Operation": "CreateFleet"},
        "PauseAutomation": {"Reason": "an experiment"},
        "ResumeAutomation": {},
        "StartFleetRoll": {"FleetName": "main", "Reason": "a new image"},
        "UpdateFleetRoll": {"FleetName": "main", "Paused": True},
        "StopFleetRoll": {"FleetName": "main"},
        "PutSource": {**world["source"]},
        "CreateSource": {**world["source"], "Bytes": 10},
        "CompleteSource": world["source"],
        "ResumeTrainingJob": job,
        "StopTrainingJob": job,
        "ListTrainingJobNodes": job,
        "ListTimeSpans": job,
        "DescribeDuties": {},
        "ListTrainingJobRevisions": job,
        "GetReport": {"Period": "Day"},
        "ListProjectQuotas": {},
        "PutProjectQuota": {"Project": "speech", "MaxNodeCount": 4},
        "DeleteProjectQuota": {"Project": "speech"},
        "UpdateFleet": {"FleetName": "main", "SpareCount": 2},
        "UpdateTrainingJob": {**job, "Priority": 4, "Tags": {"team": "b"}},
    }


# Generated files and routes


def test_everything_that_is_made_from_the_api_is_current():
    assert stale(ROOT) == [], "run python -m control_plane.contract, and read what changes"


def test_every_route_is_an_operation_of_the_model_and_a_method_of_the_client(client):
    named = {
        operation["operationId"]
        for _, _, operation in operations(make_surface().openapi())
        if not is_server_sent(operation)
    }
    assert named == MODEL["operations"].keys()
    assert [name for name in named if not callable(getattr(client, python_name(name), None))] == []


def test_whatever_can_be_sent_is_strict():
    """Every input schema is strict: the service refuses a value of the wrong type, as the client does.

    A schema that is not strict would convert such a value.
    """
    lax = [
        kind.__name__
        for kind in subclasses(common_schemas.Shape)
        if kind.__name__ in reachable_inputs() and not kind.model_config.get("strict")
    ]
    assert lax == []


def test_no_route_answers_nulls():
    routes = [route for room in ROOMS for route in room.router.routes if isinstance(route, APIRoute)]
    assert {route.operation_id for route in routes} == MODEL["operations"].keys() | {"StreamEvents"}
    assert [route.path for route in routes if not route.response_model_exclude_none] == [], (
        "use Router of control_plane/api/router.py"
    )


def subclasses(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from subclasses(inner)


def reachable_inputs() -> set[str]:
    found: set[str] = set()

    def walk(name: str) -> None:
        shape = MODEL["shapes"][name]
        if name not in found:
            found.add(name)
            for reference in [
                *shape.get("members", {}).values(),
                *(shape[part] for part in ("member", "key", "value") if part in shape),
            ]:
                walk(reference["shape"])

    for operation in MODEL["operations"].values():
        if "input" in operation:
            walk(operation["input"]["shape"])
    return found


# Successful calls of every operation


def test_every_operation_goes_there_and_back(service, client, world):
    service.operator.create_group("another")
    wanted = calls(world)
    assert wanted.keys() == MODEL["operations"].keys()
    sources = world["job"].service.objects
    archive = next(sources.get(info.reference) for info in sources.list(reference("projects/default/sources/")))
    order = sorted(
        wanted, key=lambda name: (name.startswith("Delete"), name.startswith("Stop"), not name.startswith("StartDrill"))
    )
    for name in order:
        extra = {"Body": archive} if name == "PutSource" else {}
        answer = getattr(client, python_name(name))(**wanted[name], **extra)
        metadata = answer["ResponseMetadata"]
        assert metadata["HTTPStatusCode"] == MODEL["operations"][name]["http"]["responseCode"], name
        assert metadata["RequestId"] == metadata["HTTPHeaders"]["x-amzn-requestid"], name
        shape = MODEL["shapes"][MODEL["operations"][name]["output"]["shape"]]
        assert set(shape.get("required", ())) <= answer.keys(), name
        if "Body" in answer:
            assert answer["Body"].read() in (b"hello\n", b"weights", SNAPSHOT_DATA[:5])
        if "EventStream" in answer:
            assert next(iter(answer["EventStream"]))["LogEvents"]["NextForwardToken"]
            answer["EventStream"].close()


def reference(key: str) -> Any:
    return ObjectReference(bucket=BUCKET, key=key)


def test_what_is_answered_is_what_the_model_has_and_nothing_is_null(http, world, client):
    """Responses contain no null and only fields that the model has.

    botocore silently drops unknown fields, so the test reads the responses over plain HTTP.
    """
    jobs = (
        "training-jobs",
        *(
            f"training-jobs/gpt{rest}"
            for rest in ("", "/protection", "/logs/events", "/outputs", "/checkpoints", "/metrics")
        ),
    )
    for path in (
        *jobs,
        "incidents",
        "incidents/inc-0",
        "events",
        "fleets",
        "fleets/main",
        "nodes",
        "nodes/i-0",
        "tokens",
        "caller-identity",
    ):
        answer = http.get(f"/v1/{path}")
        template = (
            f"/v1/{path}".replace("gpt", "{TrainingJobName}")
            .replace("inc-0", "{IncidentId}")
            .replace("/main", "/{FleetName}")
        )
        template = template.replace("i-0", "{NodeId}")
        (operation,) = [
            o
            for o in MODEL["operations"].values()
            if (o["http"]["method"], o["http"]["requestUri"]) == ("GET", template)
        ]
        hold(answer.json(), operation["output"]["shape"], path)


def hold(value: Any, name: str, where: str) -> None:
    """Check that a value in a response matches the shape of this name in the service model."""
    shape = MODEL["shapes"][name]
    kind = shape["type"]
    assert value is not None, where
    if shape.get("document"):
        return
    if kind == "structure":
        assert value.keys() <= shape["members"].keys(), where
        assert set(shape.get("required", ())) <= value.keys(), where
        for field, inner in value.items():
            hold(inner, shape["members"][field]["shape"], f"{where}.{field}")
    elif kind == "list":
        for inner in value:
            hold(inner, shape["member"]["shape"], f"{where}[]")
    elif kind == "map":
        for inner in value.values():
            hold(inner, shape["value"]["shape"], f"{where}{{}}")
    else:
        types = {
            "string": str,
            "boolean": bool,
            "integer": int,
            "long": int,
            "double": (int, float),
            "timestamp": (int, float),
        }
        assert isinstance(value, types[kind]), where
        assert value in shape.get("enum", [value]), where


def test_times_are_seconds_on_the_wire_and_datetimes_here(http, client, world):
    assert http.get("/v1/fleets/main").json()["CreationTime"] == START.timestamp()
    assert client.describe_fleet(FleetName="main")["CreationTime"] == START


def test_pages_follow_each_other(client, world):
    paged = all_pages(client, "list_events", MaxResults=1)
    assert len(paged) > 2
    assert paged == client.list_events()["Events"]
    limited = (
        client.get_paginator("list_events")
        .paginate(PaginationConfig={"MaxItems": 2, "PageSize": 1})
        .build_full_result()
    )
    assert limited["Events"] == paged[:2]
    rest = client.get_paginator("list_events").paginate(PaginationConfig={"StartingToken": limited["NextToken"]})
    assert [event for page in rest for event in page["Events"]] == paged[2:]


# Requests that the service refuses


def test_every_kind_of_refusal_is_typed(client, service, world):
    with pytest.raises(client.exceptions.ResourceNotFoundException, match="no training job named 'none'") as missing:
        client.describe_training_job(TrainingJobName="none")
    assert missing.value.response["ResponseMetadata"]["HTTPStatusCode"] == 404
    assert missing.value.response["ResponseMetadata"]["RequestId"]
    with pytest.raises(client.exceptions.ConflictException) as taken:
        client.create_fleet(FleetName="main", AutoScalingGroupName=GROUP)
    assert taken.value.response["Hint"].startswith("Choose another name")
    with pytest.raises(client.exceptions.ValidationException) as wrong:
        client.create_fleet(FleetName="new", AutoScalingGroupName="gone")
    assert [error["Field"] for error in wrong.value.response["Fields"]] == ["AutoScalingGroupName"]
    with (
        closing(service.client("est_wrong")) as nobody,
        pytest.raises(nobody.exceptions.AccessDeniedException, match="unknown, expired or revoked"),
    ):
        nobody.list_fleets()


@pytest.mark.parametrize(
    ("send", "status", "code"),
    [
        (lambda http: http.get("/v1/nothing"), 404, "ResourceNotFoundException"),
        (lambda http: http.delete("/v1/training-jobs"), 405, "ValidationException"),
        (lambda http: http.post("/v1/fleets", content=b"x" * (2**20 + 1)), 413, "ValidationException"),
        (lambda http: http.post("/v1/fleets", content=b"{"), 400, "ValidationException"),
        (lambda http: http.post("/v1/fleets", json=[]), 400, "ValidationException"),
        (lambda http: http.get("/v1/events", params={"MaxResults": "many"}), 400, "ValidationException"),
    ],
)
def test_what_no_client_of_ours_would_send_is_refused_as_the_model_says(http, send, status, code):
    answer = send(http)
    assert (answer.status_code, answer.headers["x-amzn-errortype"], answer.json()["Code"]) == (status, code, code)
    assert code in MODEL["shapes"]
    assert answer.json()["RequestId"] == answer.headers["x-amzn-requestid"]


def test_every_error_of_the_service_is_in_the_model():
    kinds = {kind.code for kind in subclasses_of_errors(errors.ApiError)}
    assert kinds == {name for name, shape in MODEL["shapes"].items() if shape.get("exception")}


def subclasses_of_errors(kind: type[errors.ApiError]) -> Iterator[type[errors.ApiError]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from subclasses_of_errors(inner)


# Validation by client and service

GOOD = {"TrainingJobName": "gpt", "Source": {"SourceId": SOURCE_ID}, "EntryPoint": "train.py", "NodeCount": 4}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"NodeCount": 0}, "NodeCount: must be at least 1, not '0'"),
        ({"NodeCount": 4097}, "NodeCount: must be at most 4096, not '4097'"),
        ({"NodeCount": "4"}, "NodeCount: must be a whole number, not '4'"),
        ({"NodeCount": True}, "NodeCount: must be a whole number, not true"),
        ({"NodeCount": 1.5}, "NodeCount: must be a whole number, not '1.5'"),
        ({"Protection": {"MaxSlowdown": 2}}, "Protection.MaxSlowdown: must be at most 1, not '2'"),
        ({"Protection": {"MaxSlowdown": "x"}}, "Protection.MaxSlowdown: must be a number, not 'x'"),
        ({"Protection": []}, "Protection: must be an object"),
        ({"CheckpointConfig": {"ThirdSlot": 1}}, "CheckpointConfig.ThirdSlot: must be true or false, not '1'"),
        ({"CheckpointConfig": {"S3Uri": "http://x"}}, "CheckpointConfig.S3Uri: must match ^s3://"),
        ({"TrainingJobName": "trailing\n"}, "TrainingJobName: must match ^"),
        ({"EntryPoint": ""}, "EntryPoint: must have at least 1 characters"),
        ({"EntryPoint": "x" * 513}, "EntryPoint: must have at most 512 characters"),
        ({"EntryPoint": 7}, "EntryPoint: must be text, not '7'"),
        ({"Source": {"SourceId": "../../etc"}}, "Source.SourceId: must match ^[0-9a-f]{64}$, not '../../etc'"),
        ({"Source": {}}, "Source.SourceId: is missing"),
        ({"Environment": {"A=B": "x"}}, "Environment.A=B: must match ^"),
        ({"HyperParameters": {"a": 1}}, "HyperParameters.a: must be text, not '1'"),
        (
            {"HyperParameters": {f"p{number}": "" for number in range(101)}},
            "HyperParameters: must have at most 100 entries",
        ),
        ({"Tags": {"x" * 257: ""}}, "must have at most 256 characters"),
        ({"InputDataConfig": {}}, "InputDataConfig: must be a list"),
        ({"Unknown": 1}, "Unknown: is not a field of this request"),
        ({"Source": {"SourceId": SOURCE_ID, "Path": ""}}, "Source.Path: is not a field of this request"),
        (
            {"ResourceConfig": {}},
            "ResourceConfig: is a SageMaker field that Everstep does not support; use FleetName, NodeCount "
            "and RanksPerNode",
        ),
        (
            {"StoppingCondition": {"MaxWaitTimeInSeconds": 1}},
            "does not support; use StoppingCondition.MaxPendingTimeInSeconds",
        ),
        (
            {"NodeCount": 0, "RanksPerNode": 65},
            "NodeCount: must be at least 1, not '0'; RanksPerNode: must be at most 64, not '65'",
        ),
    ],
)
def test_client_and_service_say_the_same_about_a_field(client, http, change, said):
    request = {**GOOD, **change}
    with pytest.raises(ParamValidationError) as here:
        client.create_training_job(**request)
    there = http.post("/v1/training-jobs", json=request)
    assert there.status_code == 400
    assert said in str(here.value)
    assert there.json()["Message"] == str(here.value)
    assert [(error["Field"], error["Message"]) for error in there.json()["Fields"]] == [
        (error.field, error.message) for error in here.value.fields
    ]


def numbers(name: str, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each integer field of a shape, with the path to the field."""
    shape = MODEL["shapes"][name]
    if shape["type"] in ("integer", "long"):
        yield path, shape
    for field, member in shape.get("members", {}).items():
        yield from numbers(member["shape"], f"{path}.{field}")
    for inner in ("member", "value"):
        if inner in shape:
            yield from numbers(shape[inner]["shape"], f"{path}[]")


def test_every_whole_number_that_callers_say_has_bounds_so_that_no_database_is_asked_for_what_it_cannot_hold():
    found = [
        each
        for name, operation in MODEL["operations"].items()
        if "input" in operation
        for each in numbers(operation["input"]["shape"], name)
    ]
    assert len(found) > 50
    assert [path for path, shape in found if not {"min", "max"} <= shape.keys()] == []


def test_parameters_of_the_path_and_the_query_are_judged_alike(client, http):
    for send, path in (
        (lambda: client.list_events(MaxResults=0), "/v1/events?MaxResults=0"),
        (lambda: client.list_training_jobs(StatusEquals="Sleeping"), "/v1/training-jobs?StatusEquals=Sleeping"),
        (lambda: client.describe_node(NodeId="i" * 64), f"/v1/nodes/{'i' * 64}"),
        (lambda: client.describe_source(SourceId="x"), "/v1/sources/x"),
    ):
        with pytest.raises(ParamValidationError) as here:
            send()
        assert http.get(path).json()["Message"] == str(here.value)


def test_a_refusal_of_the_client_survives_a_queue(client):
    with pytest.raises(ParamValidationError) as refused:
        client.create_training_job(**{**GOOD, "NodeCount": 0})
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


def values(name: str, depth: int = 0) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a shape. About half of the values are invalid."""
    shape = MODEL["shapes"][name]
    junk = st.sampled_from(["", "x", 0, -1, 1.5, True, [], {}, "a" * 300, 10**9])
    if shape.get("document"):
        return st.just({})
    if shape["type"] == "structure":
        fields = {field: values(member["shape"], depth + 1) for field, member in shape["members"].items()}
        required = {field: fields[field] for field in shape.get("required", ())}
        free = {field: strategy for field, strategy in fields.items() if field not in required}
        right = st.fixed_dictionaries(required, optional={**free, "VpcConfig": st.just({})} if depth == 0 else free)
        return right if depth == 0 else right | junk
    if shape["type"] == "list":
        return st.lists(values(shape["member"]["shape"], depth + 1), max_size=2) | junk
    if shape["type"] == "map":
        return st.dictionaries(st.text(max_size=4), values(shape["value"]["shape"], depth + 1), max_size=2) | junk
    limits = {"min_value": shape.get("min", -5) - 1, "max_value": min(shape.get("max", 10), 10**6) + 1}
    if shape["type"] in ("integer", "long"):
        return st.integers(**limits) | junk
    if shape["type"] == "double":
        return st.floats(**limits, allow_nan=False) | junk
    if shape["type"] == "boolean":
        return st.booleans() | junk
    return (
        (st.from_regex(shape["pattern"], fullmatch=True) | junk) if "pattern" in shape else st.text(max_size=3) | junk
    )


BODIES = [
    jobs_schemas.CreateTrainingJobRequest,
    fleets_schemas.CreateFleetRequest,
    tokens_schemas.CreateJoinTokenRequest,
    tokens_schemas.CreateTokenRequest,
]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=st.sampled_from(BODIES))
def test_whatever_is_sent_both_sides_judge_alike(data, kind):
    request = data.draw(values(kind.__name__))
    shape = SHAPES.operation_model(kind.__name__.removesuffix("Request"))
    assert judged_here(request, shape) == judged_there(request, kind)


def judged_here(request: dict[str, Any], operation: Any) -> list[tuple[str, str]]:
    try:
        validation.check(request, operation)
    except validation.ValidationError as error:
        return sorted((wrong.field, wrong.message) for wrong in error.fields)
    return []


def judged_there(request: dict[str, Any], kind: type[BaseModel]) -> list[tuple[str, str]]:
    try:
        kind.model_validate(request, by_alias=True)
    except PydanticError as error:
        refusal = errors.from_validation(
            RequestValidationError([{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()])
        )
        return sorted((wrong.field, wrong.message) for wrong in refusal.fields)
    return []


@pytest.fixture(scope="module", autouse=True)
def shapes(client) -> None:
    global SHAPES
    SHAPES = client.meta.service_model


SHAPES: Any = None


# boto3 features that users' tests and scripts use


def test_a_stubber_works():
    client = everstep.client("http://127.0.0.1:1", "t")
    with Stubber(client) as stub:
        stub.add_response(
            "stop_training_job", {**summary(), "TrainingJobStatus": "Stopping"}, {"TrainingJobName": "gpt"}
        )
        stub.add_client_error("describe_training_job", "ResourceNotFoundException", "No.", 404)
        assert client.stop_training_job(TrainingJobName="gpt")["TrainingJobStatus"] == "Stopping"
        with pytest.raises(client.exceptions.ResourceNotFoundException):
            client.describe_training_job(TrainingJobName="gpt")


def summary() -> dict[str, Any]:
    shape = MODEL["shapes"]["TrainingJobSummary"]
    kinds = {field: MODEL["shapes"][shape["members"][field]["shape"]]["type"] for field in shape["required"]}
    return {field: START if kind == "timestamp" else "x" if kind == "string" else 1 for field, kind in kinds.items()}


@pytest.mark.parametrize(
    ("waiter", "operation", "looks", "is_failure"),
    [
        (
            "training_job_running",
            "DescribeTrainingJob",
            [{"SecondaryStatus": "Pending"}, {"SecondaryStatus": "Training"}],
            False,
        ),
        (
            "training_job_running",
            "DescribeTrainingJob",
            [{"SecondaryStatus": "Pending"}, {"TrainingJobStatus": "Failed"}],
            True,
        ),
        (
            "training_job_recovered",
            "DescribeTrainingJob",
            [
                {"SecondaryStatus": "Restarting", "OpenIncidentCount": 1},
                {"SecondaryStatus": "Training", "OpenIncidentCount": 1},
                {"SecondaryStatus": "Training", "OpenIncidentCount": 0},
            ],
            False,
        ),
        (
            "training_job_recovered",
            "DescribeTrainingJob",
            [{"OpenIncidentCount": 1, "TrainingJobStatus": "Failed"}],
            True,
        ),
        (
            "training_job_recovered",
            "DescribeTrainingJob",
            [{"OpenIncidentCount": 1, "TrainingJobStatus": "Completed"}],
            False,
        ),
        (
            "training_job_completed_or_stopped",
            "DescribeTrainingJob",
            [
                {"TrainingJobStatus": "InProgress", "AssignedNodeCount": 0},
                {"TrainingJobStatus": "Stopped", "AssignedNodeCount": 2},
                {"TrainingJobStatus": "Stopped", "AssignedNodeCount": 0},
            ],
            False,
        ),
        ("training_job_completed_or_stopped", "DescribeTrainingJob", [{"TrainingJobStatus": "Failed"}], True),
        (
            "training_job_paused",
            "DescribeTrainingJob",
            [{"SecondaryStatus": "Pausing"}, {"SecondaryStatus": "Paused"}],
            False,
        ),
        (
            "training_job_paused",
            "DescribeTrainingJob",
            [{"SecondaryStatus": "Stopping", "TrainingJobStatus": "Stopping"}],
            True,
        ),
        (
            "fleet_ready",
            "DescribeFleet",
            [
                {
                    "FleetStatus": "active",
                    "DesiredNodeCount": 0,
                    "ConnectedNodeCount": 0,
                    "MinNodeCount": 0,
                    "SpareCount": 1,
                },
                {
                    "FleetStatus": "active",
                    "DesiredNodeCount": 3,
                    "ConnectedNodeCount": 2,
                    "MinNodeCount": 0,
                    "SpareCount": 1,
                },
                {
                    "FleetStatus": "active",
                    "DesiredNodeCount": 3,
                    "ConnectedNodeCount": 3,
                    "MinNodeCount": 0,
                    "SpareCount": 1,
                },
            ],
            False,
        ),
        (
            "fleet_ready",
            "DescribeFleet",
            [
                {
                    "FleetStatus": "active",
                    "DesiredNodeCount": 0,
                    "ConnectedNodeCount": 0,
                    "MinNodeCount": 2,
                    "SpareCount": 0,
                },
                {
                    "FleetStatus": "active",
                    "DesiredNodeCount": 0,
                    "ConnectedNodeCount": 0,
                    "MinNodeCount": 0,
                    "SpareCount": 0,
                },
            ],
            False,
        ),
        (
            "fleet_ready",
            "DescribeFleet",
            [{"FleetStatus": "frozen", "DesiredNodeCount": 3, "ConnectedNodeCount": 3}],
            True,
        ),
        (
            "drills_over",
            "DescribeTrainingJob",
            [{"OpenDrillId": "drill-1"}, {"TrainingJobStatus": "InProgress"}],
            False,
        ),
        (
            "checkpoint_available",
            "ListCheckpoints",
            [
                {"Checkpoints": []},
                {"Checkpoints": [{"Status": "Uploading"}]},
                {"Checkpoints": [{"Status": "Uploading"}, {"Status": "Complete"}], "TrainingJobStatus": "Failed"},
            ],
            False,
        ),
        *(
            (
                "checkpoint_available",
                "ListCheckpoints",
                [
                    {"Checkpoints": [{"Status": "Requested"}], "TrainingJobStatus": "Stopping"},
                    {"Checkpoints": [{"Status": "Requested"}], "TrainingJobStatus": status},
                ],
                True,
            )
            for status in ("Completed", "Failed", "Stopped")
        ),
    ],
)
def test_waiters_wait_for_what_they_say(waiter, operation, looks, is_failure):
    client = everstep.client("http://127.0.0.1:1", "t")
    asked: list[dict[str, Any]] = []

    def answer(model: Any, **_: Any) -> Any:
        assert model.name == operation
        asked.append(looks[len(asked)])
        return answered(200), {**asked[-1], "ResponseMetadata": {"HTTPStatusCode": 200}}

    client.meta.events.register(f"before-call.{SERVICE}", answer)
    wanted = {"FleetName": "main"} if operation == "DescribeFleet" else {"TrainingJobName": "gpt"}
    if is_failure:
        with pytest.raises(WaiterError, match="terminal failure"):
            client.get_waiter(waiter).wait(**wanted, WaiterConfig={"Delay": 0})
    else:
        client.get_waiter(waiter).wait(**wanted, WaiterConfig={"Delay": 0})
    assert len(asked) == len(looks)


def answered(status: int) -> Any:
    return AWSResponse(None, status, {}, io.BytesIO())


def test_every_waiter_of_the_model_is_tested():
    waiters = json.loads(files()[next(path for path in files() if path.name == "waiters-2.json")])["waiters"]
    (marks,) = [mark for mark in test_waiters_wait_for_what_they_say.pytestmark if mark.name == "parametrize"]
    assert {python_name(name) for name in waiters} == {row[0] for row in marks.args[1]}


def test_errors_can_be_caught_by_code_too(client, world):
    with pytest.raises(ClientError) as refused:
        client.describe_node(NodeId="i-9")
    assert refused.value.response["Error"] == {
        "Code": "ResourceNotFoundException",
        "Message": "There is no node named 'i-9'.",
    }
    assert without_metadata(refused.value.response)["Hint"] == ""

"""API models: base classes, name patterns, limits and errors that all resources share."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, WithJsonSchema, model_validator
from pydantic.alias_generators import to_pascal
from pydantic_core import InitErrorDetails

from everstep.protocol.agent_messages import Obstacle
from everstep.protocol.ids import NAME_PATTERN

MAX_NODE_COUNT = 4096
MAX_WHOLE_NUMBER = 2**63 - 1
"""Largest integer that a database column stores.

Validation rejects larger numbers before any query runs.
"""
MAX_RUNTIME_SECONDS = 2_419_200
"""Limit of MaxRuntimeInSeconds: 28 days, as in SageMaker."""
MIN_COST_USD = 0.01
MIN_CHECKPOINT_AGE_SECONDS = 60
MAX_TRASH_HOURS = 366 * 24
MIN_CHECKPOINT_OVERHEAD = 0.0001
MAX_STORE_PATIENCE_SECONDS = 7 * 86_400
MAX_PRIORITY = 1_000
MAX_PRICE_USD_PER_HOUR = 10_000
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
"""A name of 1 to 63 letters, digits and single hyphens (SageMaker's rule for TrainingJobName)."""
RoleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_+=,.@-]{1,64}$")]
RoleArn = Annotated[str, StringConstraints(pattern=r"^arn:aws[a-z-]*:iam::[0-9]{12}:role/[A-Za-z0-9_+=,.@/-]{1,512}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
MAX_S3_PATH_CHARACTERS = 900
S3Uri = Annotated[
    str,
    StringConstraints(
        pattern=rf"^s3://[a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9](/[^\x00-\x1f]{{0,{MAX_S3_PATH_CHARACTERS}}})?$"
    ),
]
ShortText = Annotated[str, StringConstraints(max_length=256)]
Value = Annotated[str, StringConstraints(max_length=4096)]
ArgumentWord = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00]*$")]
FilePattern = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00*]*\*{0,2}[^\x00*]*$")]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]
Environment = Annotated[dict[VariableName, Value], Field(max_length=100, json_schema_extra={"x-sensitive": True})]
"""Environment variables by name.

The values are marked sensitive, because some users put credentials into them instead of using `Secrets`.
"""
Hidden = Annotated[str, Field(json_schema_extra={"x-sensitive": True})]
"""A secret string. Clients and the server omit it from their logs."""
SecretReference = Annotated[
    str,
    StringConstraints(
        pattern=r"^(secretsmanager:[A-Za-z0-9/_+=.@-]{1,512}|ssm:[A-Za-z0-9/_.-]{1,1011}"
        r"|arn:aws[a-z-]*:(secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:[A-Za-z0-9/_+=.@-]{1,512}"
        r"|ssm:[a-z0-9-]+:[0-9]{12}:parameter/[A-Za-z0-9/_.-]{1,1011}))$"
    ),
]
HyperParameterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,255}$")]
ModuleName = Annotated[
    str, StringConstraints(max_length=512, pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")
]
ChannelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00]{0,4094}$")]
LoggedNumber = Annotated[
    float, WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}]})
]
"""A float that may be NaN or infinite.

JSON has no NaN or infinity, so these values are sent as text, as in AWS's APIs. Clients convert the text back.
"""
Tags = Annotated[dict[ShortText, ShortText], Field(max_length=50)]


class Shape(BaseModel):
    """Base class of all responses: field names in PascalCase on the wire, times as seconds since 1970."""

    model_config = ConfigDict(
        alias_generator=to_pascal,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        ser_json_temporal="seconds",
        ser_json_inf_nan="strings",
    )


class OfRun(Shape):
    """A response about one run of a training job."""

    training_job_name: str
    run_id: str


class CapacityWait(Shape):
    """The wait of a job for instances that AWS does not launch."""

    missing_node_count: int
    """Number of nodes that the job lacks."""
    instance_type: str
    """Instance type of the fleet. Empty if unknown."""
    availability_zone: str
    """Zone of the fleet. Empty if unknown."""
    message: str
    """AWS's message about the newest failed launch."""
    is_out_of_capacity: bool
    """Whether AWS has too few instances of the type. false: AWS rejected the launch for another reason."""
    failed_attempt_count: int
    """Number of Everstep's launch attempts that have failed since the last successful launch.

    The count includes the first launch, but no retries by Auto Scaling itself.
    """
    next_attempt_time: datetime
    """When Everstep next attempts to launch the instances. A time in the past means that the attempt is due."""


class StoreWait(Shape):
    """The wait of a job for S3, IAM or KMS during a restore."""

    obstacle: Obstacle
    """Why the nodes could not load."""
    message: str
    """The message of the node that reported the obstacle."""
    since: datetime
    attempt_count: int
    """Number of failed attempts since then."""
    next_attempt_time: datetime


class SentObject(dict[str, Any]):
    """A JSON object that `api.json_body` has parsed from the body of a client's request.

    Validation uses the type to distinguish a client's input from objects that the service builds itself.
    """


class Request(Shape):
    """Base class of all request bodies: rejects unknown fields and does not convert values of a wrong type."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_python_names(cls, data: Any) -> Any:
        """Reject Python field names such as `node_count` in a client's JSON, which must use `NodeCount`.

        The service's own code may use the Python names.
        """
        if isinstance(data, SentObject) and (ours := [name for name in data if name in cls.model_fields]):
            unknown = [InitErrorDetails(type="extra_forbidden", loc=(name,), input=data[name]) for name in ours]
            raise ValidationError.from_exception_data(cls.__name__, unknown)
        return data


class Changes(Shape):
    """The difference between a response and an earlier response to the same request."""

    change_token: str
    """Token to pass as ChangesSince in the next request."""
    is_incremental: bool
    """Whether the response contains only the changes since the earlier response.

    False if the server does not know the token in ChangesSince. The response then contains everything.
    """
    removed: list[str]
    """Keys of the entries that the earlier response contained and that the complete response no longer contains."""


class FieldError(Shape):
    """One invalid field of a request, with the problem."""

    field: str
    """Path of the field, for example `CheckpointConfig.EverySteps`."""
    message: str
    """A sentence about the problem, with the invalid value or the limit."""


class ErrorResponse(Shape):
    """The body of every error response."""

    code: str
    """The error's type, also sent in the header `x-amzn-errortype`."""
    message: str
    request_id: str
    """Identifies the request in the server's log. Also sent in the header `x-amzn-requestid`."""
    hint: str
    """How to correct the problem; empty if there is no advice."""
    fields: list[FieldError] = Field(default_factory=list)

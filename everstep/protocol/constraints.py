"""Composes the error sentences for request fields that break a constraint of the API contract.

The client and the service both use them, so both report the same text. The callers check the constraints.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

LONGEST_QUOTE: Final = 100
SAGEMAKER_FIELDS: Final = {
    "AlgorithmSpecification": "use Source and EntryPoint",
    "CheckpointConfig.LocalPath": "the agent restores state from memory",
    "DebugHookConfig": "leave it out",
    "DebugRuleConfigurations": "leave it out",
    "EnableInterContainerTrafficEncryption": "leave it out",
    "EnableManagedSpotTraining": "the fleet's Auto Scaling group decides about spot instances",
    "EnableNetworkIsolation": "the fleet's launch template configures networks",
    "ExperimentConfig": "use Tags",
    "InfraCheckConfig": "leave it out",
    "InputDataConfig.CompressionType": "files are passed unchanged",
    "InputDataConfig.ContentType": "leave it out",
    "InputDataConfig.DataSource.DatasetSource": "leave it out",
    "InputDataConfig.DataSource.FileSystemDataSource.FileSystemAccessMode": (
        "the mount decides whether the directory is writable"
    ),
    "InputDataConfig.DataSource.FileSystemDataSource.FileSystemId": "mount it on the nodes, and name its directory",
    "InputDataConfig.DataSource.FileSystemDataSource.FileSystemType": "mount it on the nodes, and name its directory",
    "InputDataConfig.DataSource.S3DataSource.AttributeNames": "leave it out",
    "InputDataConfig.DataSource.S3DataSource.InstanceGroupNames": "every node gets all data",
    "InputDataConfig.DataSource.S3DataSource.S3DataDistributionType": "every node gets all data",
    "InputDataConfig.DataSource.S3DataSource.S3DataType": "S3Uri accepts an object or a prefix",
    "InputDataConfig.InputMode": "all files are downloaded before the ranks start",
    "InputDataConfig.RecordWrapperType": "leave it out",
    "InputDataConfig.ShuffleConfig": "the data loader shuffles",
    "MlflowConfig": "leave it out",
    "ModelPackageConfig": "leave it out",
    "OutputDataConfig.CompressionType": "outputs are stored unchanged",
    "OutputDataConfig.KmsKeyId": "the bucket configures encryption",
    "ProfilerConfig": "leave it out",
    "ProfilerRuleConfigurations": "leave it out",
    "RemoteDebugConfig": "leave it out",
    "ResourceConfig": "use FleetName, NodeCount and RanksPerNode",
    "RetryStrategy.MaximumRetryAttempts": "use RetryStrategy.MaxAttempts",
    "ServerlessJobConfig": "leave it out",
    "SessionChainingConfig": "leave it out",
    "StoppingCondition.MaxWaitTimeInSeconds": "use StoppingCondition.MaxPendingTimeInSeconds",
    "TensorBoardOutputConfig": "leave it out",
    "VpcConfig": "the fleet's launch template configures networks",
}
"""Fields of SageMaker's CreateTrainingJob that Everstep lacks, each with a suggested replacement."""

FIXED_FIELDS: Final = frozenset(
    {
        "CheckpointConfig.S3Uri",
        "EntryPoint",
        "Environment",
        "FleetName",
        "HyperParameters",
        "InputDataConfig",
        "NodeCount",
        "OutputDataConfig",
        "Project",
        "RanksPerNode",
        "Requirements",
        "RoleArn",
        "Secrets",
        "Source",
    }
)
"""Fields of a training job that are set at creation and cannot change."""

MISSING: Final = "is missing"
NOT_JSON: Final = "the body is not JSON"
NULL: Final = "must not be null; leave the field out instead"
NOT_FINITE: Final = "must be a finite number"
HAS_NUL: Final = "must not contain the character NUL"
HALF_CHARACTER: Final = "must be valid Unicode; it contains half of a surrogate pair"
TOO_DEEP: Final = "nests lists and objects too deeply"
KINDS: Final = {
    "string": "text",
    "integer": "a whole number",
    "long": "a whole number",
    "float": "a number",
    "double": "a number",
    "boolean": "true or false",
    "timestamp": "a time",
    "list": "a list",
    "map": "an object of names and values",
    "structure": "an object",
    "blob": "bytes",
}
"""Words for each value type, by botocore's name of the type."""


def unknown(field: str) -> str:
    """Return the error sentence about an unknown field, with the replacement of a field of SageMaker."""
    instead = SAGEMAKER_FIELDS.get(re.sub(r"\[\d+\]", "", field))
    if field in FIXED_FIELDS:
        return "is not a field of this request; of a training job it is set at creation and cannot be changed"
    return (
        "is not a field of this request"
        if instead is None
        else f"is a SageMaker field that Everstep does not support; {instead}"
    )


def wrong_type(kind: str, given: object) -> str:
    """Return the error sentence about a value of a wrong type. `kind` is a key of `KINDS`."""
    return f"must be {KINDS[kind]}{_not(given)}"


def at_least(minimum: float, given: object) -> str:
    """Return the error sentence about a number below the minimum."""
    return f"must be at least {_number(minimum)}{_not(given)}"


def at_most(maximum: float, given: object) -> str:
    """Return the error sentence about a number above the maximum."""
    return f"must be at most {_number(maximum)}{_not(given)}"


def too_short(minimum: int) -> str:
    """Return the error sentence about text with too few characters."""
    return f"must have at least {minimum} characters"


def too_long(maximum: int) -> str:
    """Return the error sentence about text with too many characters."""
    return f"must have at most {maximum} characters"


def too_few(minimum: int) -> str:
    """Return the error sentence about a list or map with too few entries."""
    return f"must have at least {minimum} entries"


def too_many(maximum: int) -> str:
    """Return the error sentence about a list or map with too many entries."""
    return f"must have at most {maximum} entries"


def mismatch(pattern: str, given: object) -> str:
    """Return the error sentence about text that does not match a pattern."""
    return f"must match {pattern}{_not(given)}"


def none_of(values: Sequence[str], given: object) -> str:
    """Return the error sentence about a value that is not one of the allowed values."""
    return f"must be one of {', '.join(values)}{_not(given)}"


def summary(fields: Sequence[tuple[str, str]]) -> str:
    """Return one sentence for a whole request. An empty path stands for the request itself."""
    return "The request is not valid: " + "; ".join(
        f"{field}: {message}" if field else message for field, message in fields
    )


def path_of(parts: Sequence[str | int]) -> str:
    """Return a field's path as text, for example `A.B[0]`."""
    return re.sub(r"\.(?=\[)", "", ".".join(f"[{part}]" if isinstance(part, int) else part for part in parts))


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) and not value.is_integer() else f"{int(value)}"


def _not(given: object) -> str:
    if isinstance(given, bool):
        return f", not {str(given).lower()}"
    return f", not {str(given)[:LONGEST_QUOTE]!r}" if isinstance(given, (str, int, float)) else ""

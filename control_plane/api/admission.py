"""Validates a CreateTrainingJob request against the job's fleet, quota and source archive. Pure.

A `SavedJobSpec` from `admit` needs no further check. All errors of a request are reported together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Final

import msgspec

from control_plane.api.allowance import Allowance
from control_plane.api.errors import InvalidRequest
from control_plane.api.schemas.common import MAX_S3_PATH_CHARACTERS
from control_plane.api.schemas.jobs import Channel, CreateTrainingJobRequest, ProtectionConfig
from control_plane.api.spec_fields import stored
from control_plane.core import checkpoints, elastic, parity
from control_plane.db.fleets import FleetRecord
from control_plane.db.jobs import InitialState, JobInput, SavedJobSpec
from control_plane.db.quotas import QuotaRecord
from control_plane.db.sources import SourceRecord
from control_plane.loop.job_objects import own_place
from everstep.protocol.plan import CHECK_VARIABLE, channel_variable, check_steps

RESERVED_VARIABLES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "LOCAL_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
    }
    | {"AWS_EC2_METADATA_DISABLED"}
)
RESERVED_PREFIX = "EVERSTEP_"
KEY_VARIABLES = frozenset(
    {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"}
    | {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    }
)
"""Variables that would make AWS SDKs ignore the credentials of the job's RoleArn."""

MAX_SPEC_BYTES: Final = 64 * 1024
"""Largest size of a job's settings as JSON. Lists and loops read the settings of many jobs at once."""
_LARGE: Final = {
    "environment": "Environment",
    "hyperparameters": "HyperParameters",
    "arguments": "Arguments",
    "secrets": "Secrets",
    "inputs": "InputDataConfig",
}
"""Settings without a small limit of their own, and their fields."""
_STORED_AS_SENT: Final = (
    CreateTrainingJobRequest.model_fields.keys() & {field.name for field in fields(SavedJobSpec)}
) - {"entry_point"}
"""Fields that `admit` copies unchanged, if the request sets them."""


def admit(
    request: CreateTrainingJobRequest,
    *,
    run_id: str,
    project: str,
    fleet: FleetRecord,
    max_node_count: int,
    source: SourceRecord,
    bucket: str,
    default_max_slowdown: float,
    quota: QuotaRecord | None = None,
    allowance: Allowance | None = None,
    alternatives: Sequence[tuple[FleetRecord, int]] = (),
    initial: InitialState | None = None,
) -> SavedJobSpec:
    """Return the specification of a request that passed the model's validation, with all defaults filled in.

    `max_node_count` is the current MaxSize of the fleet's group. Each of the `alternatives` contains its own MaxSize.
    `bucket` is the service's. Without a `quota`, the number of nodes has no limit. `allowance` is None for an
    administrator. Raises InvalidRequest with one field error per error.
    """
    own = own_place(bucket, project, request.training_job_name, run_id)
    checkpoint_uri, output_uri = _asked_checkpoints(request), _asked_output(request, run_id)
    spec = SavedJobSpec(
        **{name: value for name in _STORED_AS_SENT if (value := getattr(request, name)) is not None},
        source_sha256=source.sha256,
        source_bucket=source.bucket,
        source_key=source.key,
        source_bytes=source.archive_bytes,
        copies=copies_of(request),
        parity_group_size=_parity_group_size(request),
        max_slowdown=(request.protection or ProtectionConfig()).max_slowdown or default_max_slowdown,
        entry_point=_entry_point(request, source) or "",
        hyperparameters=dict(request.hyper_parameters),
        **stored(
            request.checkpoint_config,
            request.stopping_condition,
            request.retry_strategy,
            request.elastic_config,
            request.rehearsal,
        ),
        checkpoint_uri=checkpoint_uri or f"{own}checkpoints/",
        output_uri=output_uri or f"{own}output/",
        kept_files=list(request.output_data_config.keep or ()),
        log_uri=f"{own}logs/",
        fleet_names=[fleet.name, *request.alternative_fleet_names] if request.alternative_fleet_names else [],
        inputs=tuple(_input(channel) for channel in request.input_data_config),
        initial=initial,
    )
    wrong = [
        *contradictions(spec),
        *_reserved(request),
        *_inputs(request, bucket),
        *_outputs(checkpoint_uri, output_uri, bucket),
        *_too_large(request, fleet, max_node_count, "NodeCount"),
        *_priceless(request, fleet),
        *_no_alternative(request, fleet, alternatives),
        *_beyond(request, quota),
        *_inelastic(request, fleet, max_node_count, quota),
        *(allowance.refused(request) if allowance is not None else ()),
        *_no_script(request, source),
        *_requirements(request, source),
    ]
    if wrong:
        raise InvalidRequest("The job cannot run with this request: " + "; ".join(map(": ".join, wrong)), fields=wrong)
    return spec


def contradictions(spec: SavedJobSpec) -> Iterator[tuple[str, str]]:
    """Yield settings of a new or changed job that contradict each other or are too large, as field and message."""
    if (size := len(msgspec.json.encode(spec))) > MAX_SPEC_BYTES:
        largest = max(_LARGE, key=lambda name: len(msgspec.json.encode(getattr(spec, name))))
        message = f"the job has {size} bytes of settings, and may have {MAX_SPEC_BYTES}. Put large values into a file"
        yield _LARGE[largest], message
    yield from checkpoints.contradictions(
        every_steps=spec.checkpoint_every_steps,
        interval_seconds=spec.checkpoint_interval_seconds,
        max_overhead=spec.checkpoint_max_overhead,
        max_bytes_per_second=spec.checkpoint_max_bytes_per_second,
        max_uploads=spec.checkpoint_max_uploads,
        has_third_slot=spec.third_slot,
    )
    if spec.copies > spec.node_count:
        yield "Protection.Copies", f"{spec.copies} copies need {spec.copies} nodes; NodeCount is {spec.node_count}"
    if spec.parity_group_size is not None:
        yield from parity.contradictions(
            spec.parity_group_size, copies=spec.copies, node_count=spec.node_count, min_node_count=spec.min_node_count
        )


def copies_of(request: CreateTrainingJobRequest) -> int:
    """Return the number of holders per shard: by default 2, or 1 for a job of one node or with parity."""
    asked = request.protection
    default = 1 if _parity_group_size(request) else 2
    return (
        asked.copies if asked is not None and "copies" in asked.model_fields_set else min(default, request.node_count)
    )


def _parity_group_size(request: CreateTrainingJobRequest) -> int | None:
    return None if request.protection is None else request.protection.parity_group_size


def _reserved(request: CreateTrainingJobRequest) -> Iterator[tuple[str, str]]:
    for field, names in (("Environment", request.environment), ("Secrets", request.secrets)):
        for name in names:
            if field == "Environment" and name == CHECK_VARIABLE:
                if check_steps(request.environment[name]) is None:
                    yield f"{field}.{name}", "must be a number of steps from 2 to 1000"
            elif name in RESERVED_VARIABLES or name.startswith(RESERVED_PREFIX):
                yield f"{field}.{name}", "is set by Everstep for every rank and cannot be changed"
            if request.role_arn is not None and name in KEY_VARIABLES:
                yield f"{field}.{name}", "would prevent ranks from using the credentials of RoleArn"
    for name in sorted(request.secrets.keys() & request.environment.keys()):
        yield f"Secrets.{name}", "is also set in Environment"


def _inputs(request: CreateTrainingJobRequest, bucket: str) -> Iterator[tuple[str, str]]:
    seen: dict[str, str] = {}
    for index, channel in enumerate(request.input_data_config):
        field, variable = f"InputDataConfig[{index}]", channel_variable(channel.channel_name)
        if variable in seen:
            message = f"the channels {channel.channel_name!r} and {seen[variable]!r} would both set {variable}"
            yield f"{field}.ChannelName", message
        for where, names in (("Environment", request.environment), ("Secrets", request.secrets)):
            if variable in names:
                yield f"{where}.{variable}", f"is set by the channel {channel.channel_name!r}"
        seen[variable] = channel.channel_name
        source = channel.data_source
        if (source.s3_data_source is None) == (source.file_system_data_source is None):
            yield f"{field}.DataSource", "must contain either S3DataSource or FileSystemDataSource"
        uri = source.s3_data_source.s3_uri if source.s3_data_source is not None else ""
        if request.role_arn is None and _is_in(bucket, uri):
            message = (
                f"{bucket} is the service's own bucket, which contains objects of other projects; set a RoleArn that "
                "may read it"
            )
            yield f"{field}.DataSource.S3DataSource.S3Uri", message


def _outputs(checkpoint_uri: str | None, output_uri: str | None, bucket: str) -> Iterator[tuple[str, str]]:
    """Yield errors of the S3 locations for checkpoints and outputs."""
    # Agents and the API use their own permissions there, so a location in the service's bucket could overwrite
    # other projects' objects.
    for field, uri in (("CheckpointConfig.S3Uri", checkpoint_uri), ("OutputDataConfig.S3OutputPath", output_uri)):
        if uri is None:
            continue
        if _is_in(bucket, uri):
            message = (
                f"{bucket} is the service's own bucket, which contains objects of other projects; omit this field to "
                "use the job's own prefix"
            )
            yield field, message
        length = len(uri.removeprefix("s3://").partition("/")[2])
        if length > MAX_S3_PATH_CHARACTERS:
            message = (
                f"has a path of {length} characters, including the job's own prefix; the limit is "
                f"{MAX_S3_PATH_CHARACTERS}"
            )
            yield field, message


def _is_in(bucket: str, uri: str) -> bool:
    return uri.removeprefix("s3://").partition("/")[0] == bucket


def _input(channel: Channel) -> JobInput:
    objects, directory = channel.data_source.s3_data_source, channel.data_source.file_system_data_source
    return JobInput(
        name=channel.channel_name,
        uri=objects.s3_uri if objects is not None else "",
        directory=directory.directory_path if directory is not None else "",
    )


def _too_large(
    request: CreateTrainingJobRequest, fleet: FleetRecord, max_node_count: int, field: str
) -> Iterator[tuple[str, str]]:
    if request.node_count > max_node_count:
        message = (
            f"NodeCount is {request.node_count}; the group {fleet.auto_scaling_group_name} of the fleet {fleet.name} "
            f"has MaxSize {max_node_count}. Lower NodeCount, or raise MaxSize (on a local cluster: everstep local up "
            f"--max-nodes {request.node_count})"
        )
        yield field, message


def _no_alternative(
    request: CreateTrainingJobRequest, first: FleetRecord, others: Sequence[tuple[FleetRecord, int]]
) -> Iterator[tuple[str, str]]:
    field = "AlternativeFleetNames"
    names = [first.name, *(fleet.name for fleet, _ in others)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield field, f"the fleet {name} is listed twice"
    for fleet, max_node_count in others:
        yield from _too_large(request, fleet, max_node_count, field)
        if request.stopping_condition.max_cost_usd is not None and fleet.price_usd_per_hour is None:
            yield field, f"MaxCostUsd needs the price of the fleet {fleet.name}; set PriceUsdPerHour with UpdateFleet"


def _beyond(request: CreateTrainingJobRequest, quota: QuotaRecord | None) -> Iterator[tuple[str, str]]:
    if quota is not None and quota.max_node_count is not None and request.node_count > quota.max_node_count:
        message = (
            f"NodeCount is {request.node_count}; jobs of the project {quota.project} may hold {quota.max_node_count} "
            "nodes of a fleet"
        )
        yield "NodeCount", message


def _inelastic(
    request: CreateTrainingJobRequest, fleet: FleetRecord, max_node_count: int, quota: QuotaRecord | None
) -> Iterator[tuple[str, str]]:
    limits = elastic.NodeLimits(
        group=fleet.auto_scaling_group_name,
        fleet=fleet.name,
        max_size=max_node_count,
        project=quota.project if quota is not None else "",
        quota=quota.max_node_count if quota is not None else None,
    )
    config = request.elastic_config
    yield from elastic.contradictions(request.node_count, config.min_node_count, config.max_node_count, limits)


def _priceless(request: CreateTrainingJobRequest, fleet: FleetRecord) -> Iterator[tuple[str, str]]:
    if request.stopping_condition.max_cost_usd is not None and fleet.price_usd_per_hour is None:
        message = f"needs the price of the fleet {fleet.name}; set PriceUsdPerHour with UpdateFleet"
        yield "StoppingCondition.MaxCostUsd", message


def _entry_point(request: CreateTrainingJobRequest, source: SourceRecord) -> str | None:
    """Return the path of the file that the ranks run, or None if the source lacks it."""
    if request.module is None:
        return request.entry_point if request.entry_point in source.files else None
    path = request.module.replace(".", "/")
    return next((file for file in (f"{path}/__main__.py", f"{path}.py") if file in source.files), None)


def _no_script(request: CreateTrainingJobRequest, source: SourceRecord) -> Iterator[tuple[str, str]]:
    if (request.entry_point is None) == (request.module is None):
        yield "EntryPoint", "the request needs either EntryPoint or Module"
        return
    path = _entry_point(request, source)
    if path is not None:
        if not path.endswith(".py"):
            yield "EntryPoint", f"{path!r} is not a Python file (.py)"
        return
    if request.module is not None:
        path = request.module.replace(".", "/")
        yield "Module", f"the source has neither {path}.py nor {path}/__main__.py"
        return
    scripts = [name for name in source.files if name.endswith(".py") and "/" not in name]
    has = (
        f"the source has {', '.join(scripts[:5])}{' …' if len(scripts) > 5 else ''} at its top level"
        if scripts
        else "the source has no Python file at its top level"
    )
    yield "EntryPoint", f"{request.entry_point!r} is not among the {len(source.files)} files of the source; {has}"


def _requirements(request: CreateTrainingJobRequest, source: SourceRecord) -> Iterator[tuple[str, str]]:
    if request.requirements is not None and request.requirements not in source.files:
        yield "Requirements", f"{request.requirements!r} is not among the {len(source.files)} files of the source"
    elif request.requirements is not None and request.requirements.endswith((".yaml", ".yml")):
        message = f"{request.requirements!r} is a file of conda. Write missing packages into a requirements.txt"
        yield "Requirements", message


def _asked_checkpoints(request: CreateTrainingJobRequest) -> str | None:
    """Return the request's checkpoint prefix, to which agents append a folder per run, or None."""
    uri = request.checkpoint_config.s3_uri
    return None if uri is None else f"{uri.rstrip('/')}/{request.training_job_name}/"


def _asked_output(request: CreateTrainingJobRequest, run_id: str) -> str | None:
    """Return the output prefix, or None. It contains the run id, because other jobs may have the same name."""
    uri = request.output_data_config.s3_output_path
    return None if uri is None else f"{uri.rstrip('/')}/{request.training_job_name}/run={run_id}/"

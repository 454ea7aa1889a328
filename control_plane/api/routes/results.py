"""Logs and outputs that a job has stored in S3: lists and downloads.

Invariant: only keys of the job's own generations, below the prefixes that the job writes to, are read or shown. In the
service's bucket, the job's own prefix is the only one that is read.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from itertools import groupby, islice
from typing import Annotated

from fastapi import Query
from fastapi.responses import StreamingResponse

from control_plane.api import deps, page_tokens
from control_plane.api.admission import own_place
from control_plane.api.auth import Caller, Reader
from control_plane.api.deps import MaxResults, NextToken, Router, Services, ServicesDep, TrainingJobNamePath, page_of
from control_plane.api.errors import NotFound
from control_plane.api.routes.jobs import find_job
from control_plane.api.schemas import logs as logs_schemas
from control_plane.api.schemas import results as results_schemas
from control_plane.cloud.objects import ObjectInfo
from control_plane.core.states import ENDED_JOBS
from control_plane.db import jobs, nodes
from control_plane.db.jobs import GenerationRecord, JobRecord
from control_plane.loop.records import prefix_of
from everstep.protocol.plan import ObjectReference

router = Router(prefix="/v1/training-jobs/{TrainingJobName}", tags=["Results"])

_LOG = re.compile(r"gen=(\d+)/rank=(\d+)\.(stdout|stderr)")
_OUTPUT = re.compile(r"gen=(\d+)/(.+)", re.DOTALL)
Key = Annotated[str, Query(alias="Key", min_length=1, max_length=2048)]


@router.get("/logs", operation_id="ListLogs")
def list_logs(
    training_job_name: TrainingJobNamePath,
    caller: Reader,
    services: ServicesDep,
    max_results: MaxResults = 1000,
    next_token: NextToken = None,
) -> logs_schemas.ListLogsResponse:
    """List the log streams of a job's ranks, by generation and rank.

    An expected stream that is missing is listed with the reason.
    """
    after = (
        (0, 0, "")
        if next_token is None
        else page_tokens.position(next_token, page_tokens.whole, page_tokens.whole, page_tokens.text)
    )
    with services.database.read() as session:
        job = find_job(session, training_job_name, caller)
        numbers = [each.number for each in jobs.lineage(session, job.run_id) if each.number >= after[0]]
        launched = {each.number: each for each in jobs.launched(session, job.run_id, since=after[0])}
        alive = {node.id for node in nodes.of_fleet(session, job.fleet_name)}
    found = (
        entry
        for number in numbers
        for entry in _logs_of(
            services, job, number, launched.get(number), alive, since=after[1] if number == after[0] else 0
        )
    )
    shown, more = page_of(
        list(islice((entry for entry in found if _log_position(entry) > after), max_results + 1)),
        max_results,
        _log_position,
    )
    return logs_schemas.ListLogsResponse(logs=shown, next_token=more)


@router.get(
    "/logs/content", operation_id="GetLog", response_class=StreamingResponse, responses=deps.binary_answer("text/plain")
)
def get_log(
    training_job_name: TrainingJobNamePath, key: Key, caller: Reader, services: ServicesDep
) -> StreamingResponse:
    """Download one log, by a key from ListLogs."""
    return _content(
        services,
        prefix_of(_find(services, training_job_name, caller).spec.log_uri),
        _LOG,
        key,
        "text/plain; charset=utf-8",
    )


@router.get("/outputs", operation_id="ListOutputs")
def list_outputs(
    training_job_name: TrainingJobNamePath,
    caller: Reader,
    services: ServicesDep,
    max_results: MaxResults = 1000,
    next_token: NextToken = None,
) -> results_schemas.ListOutputsResponse:
    """List the files that a job's ranks wrote into EVERSTEP_OUTPUT_DIR, by generation."""
    prefix = _outputs_of(services, _find(services, training_job_name, caller))
    after = "" if next_token is None else page_tokens.position(next_token, page_tokens.text)[0]
    of_generations = ObjectReference(bucket=prefix.bucket, key=f"{prefix.key}gen=")
    found = (
        entry
        for info in services.objects.list(of_generations, after=after)
        if (entry := _output_entry(prefix, info)) is not None
    )
    shown, more = page_of(list(islice(found, max_results + 1)), max_results, lambda entry: (entry.key,))
    return results_schemas.ListOutputsResponse(outputs=shown, next_token=more)


@router.get(
    "/outputs/content",
    operation_id="GetOutput",
    response_class=StreamingResponse,
    responses=deps.binary_answer("application/octet-stream"),
)
def get_output(
    training_job_name: TrainingJobNamePath, key: Key, caller: Reader, services: ServicesDep
) -> StreamingResponse:
    """Download one output file, by a key from ListOutputs."""
    return _content(
        services,
        _outputs_of(services, _find(services, training_job_name, caller)),
        _OUTPUT,
        key,
        "application/octet-stream",
    )


def _find(services: Services, name: str, caller: Caller) -> JobRecord:
    with services.database.read() as session:
        return find_job(session, name, caller)


def has_own_outputs(job: JobRecord, bucket: str) -> bool:
    """Return whether the job's output path holds only the job's own objects.

    This is true for a path in another bucket than the service's, `bucket`. In the service's bucket, the path must be
    below the job's own prefix. Deletions call this function, too: jobs from before the check in admission may have an
    output path among other jobs' objects.
    """
    return prefix_of(job.spec.output_uri).bucket != bucket or job.spec.output_uri.startswith(
        own_place(bucket, job.name, job.run_id)
    )


def _outputs_of(services: Services, job: JobRecord) -> ObjectReference:
    if not has_own_outputs(job, services.bucket):
        message = (
            f"The outputs of {job.name} are at {job.spec.output_uri}, among what belongs to other jobs: they "
            "are not shown here."
        )
        raise NotFound(message, hint="Ask who runs the service to copy them.")
    return prefix_of(job.spec.output_uri)


def _logs_of(
    services: Services, job: JobRecord, number: int, launched: GenerationRecord | None, alive: set[str], *, since: int
) -> Iterator[logs_schemas.LogEntry]:
    """Yield the log entries of one generation in order, from rank `since` on; reads the object store lazily."""
    nodes_of = (
        sorted((rank, node.node_id) for node in launched.plan.nodes for rank in node.ranks if rank >= since)
        if launched is not None
        else []
    )
    last = nodes_of[-1][0] if nodes_of else None
    expected = (_missing(job, number, rank, node_id, alive) for rank, node_id in nodes_of)
    present = _stored_logs(services, prefix_of(job.spec.log_uri), number, since, last)
    for _, of_rank in groupby(heapq.merge(present, expected, key=_log_position), key=lambda entry: entry.rank):
        entries = list(of_rank)
        yield from [entry for entry in entries if entry.key is not None] or entries


def _stored_logs(
    services: Services, prefix: ObjectReference, number: int, since: int, last: int | None
) -> Iterator[logs_schemas.LogEntry]:
    """Yield the stored log entries of one generation, from rank `since` on, in the order of ranks.

    S3 lists keys in lexicographic order: 1, 10, 100, 11. Ranks with as many digits as the last rank are in numeric
    order there, so a listing that starts at such a rank can stop early. Ranks with fewer digits are scattered over the
    whole listing. For such a rank, the function reads the whole listing. `last` is None if the generation's plan is no
    longer stored.
    """
    key = f"{prefix.key}gen={number}/rank="
    of_generation = ObjectReference(bucket=prefix.bucket, key=key)
    if last is None or len(str(since)) < len(str(last)):
        every = (
            entry for info in services.objects.list(of_generation) if (entry := _log_entry(prefix, info)) is not None
        )
        yield from sorted((entry for entry in every if entry.rank >= since), key=_log_position)
        return
    for info in services.objects.list(of_generation, after=f"{key}{since}"):
        # Past all keys of the last rank, such as "rank=1019.stdout": only ranks with fewer digits follow.
        if info.reference.key > f"{key}{last}/":
            return
        entry = _log_entry(prefix, info)
        if entry is not None and entry.rank >= since:
            yield entry


def _log_position(entry: logs_schemas.LogEntry) -> tuple[int, int, str]:
    return entry.generation, entry.rank, entry.stream or ""


def _log_entry(prefix: ObjectReference, info: ObjectInfo) -> logs_schemas.LogEntry | None:
    match = _LOG.fullmatch(info.reference.key[len(prefix.key) :])
    if match is None:
        return None
    generation, rank, stream = match.groups()
    return logs_schemas.LogEntry(
        generation=int(generation),
        rank=int(rank),
        stream=stream,  # type: ignore[arg-type]  # the pattern allows only stdout and stderr
        key=info.reference.key,
        bytes=info.size_bytes,
        missing_reason=None,
    )


def _missing(job: JobRecord, number: int, rank: int, node_id: str, alive: set[str]) -> logs_schemas.LogEntry:
    """Return the entry for a rank that was started but has no uploaded log, with the reason."""
    if number == job.generation and job.state not in ENDED_JOBS:
        reason = "nothing has been uploaded yet"
    elif node_id not in alive:
        reason = f"node {node_id} was lost before it had uploaded anything"
    else:
        reason = f"node {node_id} has uploaded nothing"
    return logs_schemas.LogEntry(generation=number, rank=rank, stream=None, key=None, bytes=None, missing_reason=reason)


def _output_entry(prefix: ObjectReference, info: ObjectInfo) -> results_schemas.OutputEntry | None:
    match = _OUTPUT.fullmatch(info.reference.key[len(prefix.key) :])
    if match is None or info.reference.key.endswith("/"):
        return None
    return results_schemas.OutputEntry(
        generation=int(match[1]), path=match[2], key=info.reference.key, bytes=info.size_bytes
    )


def _content(
    services: Services, prefix: ObjectReference, own: re.Pattern[str], key: str, media_type: str
) -> StreamingResponse:
    if not key.startswith(prefix.key) or own.fullmatch(key[len(prefix.key) :]) is None:
        raise NotFound(
            f"The job has nothing under the key {key!r}.", hint="Use a key that the list of the same job gave."
        )
    info = services.objects.head(ObjectReference(bucket=prefix.bucket, key=key))
    # A log may grow during the download. Send exactly the announced length.
    body = services.objects.stream(info.reference, end=info.size_bytes)
    return StreamingResponse(
        body,
        media_type=media_type,
        headers={"content-length": str(info.size_bytes), "x-content-type-options": "nosniff"},
    )

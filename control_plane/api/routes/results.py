"""Lists and downloads the outputs that a job has stored in S3.

Invariant: these operations read and show only objects of the job's own generations below its output prefix. In the
service's bucket, they read only below the job's own prefix.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import PurePosixPath
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Query
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from control_plane.api import deps, errors, page_tokens
from control_plane.api.auth import Caller, Reader
from control_plane.api.caller_threads import OPEN_DOWNLOADS, CallerThreads
from control_plane.api.deps import MaxResults, NextToken, Services, ServicesDep, TrainingJobNamePath, page_of
from control_plane.api.errors import NotFound, Throttled
from control_plane.api.router import Router
from control_plane.api.routes.jobs import find_job
from control_plane.api.schemas import results as results_schemas
from control_plane.cloud.objects import ObjectInfo
from control_plane.db.jobs import SavedJob
from control_plane.loop.job_objects import has_own_outputs
from control_plane.loop.records import prefix_of
from everstep.protocol.plan import ObjectReference

router = Router(prefix="/v1/training-jobs/{TrainingJobName}", tags=["Results"])

_OUTPUT = re.compile(r"gen=(\d+)/(.+)", re.DOTALL)
Key = Annotated[str, Query(alias="Key", min_length=1, max_length=2048)]


@router.get("/outputs", operation_id="ListOutputs")
def list_outputs(
    training_job_name: TrainingJobNamePath,
    caller: Reader,
    services: ServicesDep,
    max_results: MaxResults = 1000,
    next_token: NextToken = None,
) -> results_schemas.ListOutputsResponse:
    """List the files that a job's ranks wrote into EVERSTEP_OUTPUT_DIR, by generation.

    A page can have fewer entries than MaxResults although more follow.
    """
    prefix = _outputs_of(_find(services, training_job_name, caller))
    after = "" if next_token is None else page_tokens.position(next_token, page_tokens.text)[0]
    of_generations = ObjectReference(bucket=prefix.bucket, key=f"{prefix.key}gen=")
    # Other objects count, too: a job could store so many that one request would list S3 for minutes.
    found = list(islice(services.objects.list(of_generations, after=after), max_results + 1))
    shown, more = page_of(found, max_results, lambda info: (info.reference.key,))
    entries = (_output_entry(prefix, info) for info in shown)
    return results_schemas.ListOutputsResponse(
        outputs=[entry for entry in entries if entry is not None], next_token=more
    )


@router.get(
    "/outputs/content",
    operation_id="GetOutput",
    response_class=StreamingResponse,
    responses=deps.binary_answer("application/octet-stream"),
)
def get_output(
    training_job_name: TrainingJobNamePath, key: Key, caller: Reader, services: ServicesDep
) -> StreamingResponse:
    """Download one output file, by a key from ListOutputs.

    A browser stores the response as a file and never shows it as a page. Raises ThrottlingException while the server
    sends too many outputs to this token.
    """
    return _content(services, caller, _outputs_of(_find(services, training_job_name, caller)), key)


def _find(services: Services, name: str, caller: Caller) -> SavedJob:
    with services.database.read() as session:
        return find_job(session, name, caller)


def _outputs_of(job: SavedJob) -> ObjectReference:
    if not has_own_outputs(job):
        message = (
            f"The outputs of {job.name} are at {job.spec.output_uri}, next to objects of other jobs, so this "
            "operation does not return them."
        )
        raise NotFound(message, hint="Ask the operator of the service to copy them.")
    return prefix_of(job.spec.output_uri)


def _output_entry(prefix: ObjectReference, info: ObjectInfo) -> results_schemas.OutputEntry | None:
    match = _OUTPUT.fullmatch(info.reference.key[len(prefix.key) :])
    if match is None or info.reference.key.endswith("/"):
        return None
    return results_schemas.OutputEntry(
        generation=int(match[1]), path=match[2], key=info.reference.key, bytes=info.size_bytes
    )


class _Download(StreamingResponse):
    """A download that counts as one of its token's."""

    def __init__(self, services: Services, caller: Caller, *of_base: Any, **options: Any) -> None:
        super().__init__(*of_base, **options)
        self._open, self._token_id = services.downloads, caller.token.id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the content, or refuse it. The server calls this method once."""
        if self._open[self._token_id] >= OPEN_DOWNLOADS:
            refused = Throttled("This token has too many open downloads.", hint="Retry when one of them has ended.")
            await errors.response(refused, scope["state"]["request_id"])(scope, receive, send)
            return
        self._open[self._token_id] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._open[self._token_id] -= 1
            if not self._open[self._token_id]:
                del self._open[self._token_id]


def _content(services: Services, caller: Caller, prefix: ObjectReference, key: str) -> StreamingResponse:
    if not key.startswith(prefix.key) or _OUTPUT.fullmatch(key[len(prefix.key) :]) is None:
        raise NotFound(f"The job has no output with the key {key!r}.", hint="Use a key that ListOutputs returned.")
    info = services.objects.head(ObjectReference(bucket=prefix.bucket, key=key))
    # Limit the body to the size in the response's headers, because another writer may replace the object meanwhile.
    body = services.objects.stream(info.reference, end=info.size_bytes)
    first = next(body, b"")  # S3 refuses here, while the response can still be an error.
    return _Download(
        services,
        caller,
        _chunks(services.caller_threads, first, body),
        media_type="application/octet-stream",
        headers={
            "content-length": str(info.size_bytes),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(PurePosixPath(key).name, safe='')}",
            "x-content-type-options": "nosniff",
        },
    )


async def _chunks(threads: CallerThreads, first: bytes, rest: Iterator[bytes]) -> AsyncIterator[bytes]:
    chunk = first
    while chunk:
        yield chunk
        chunk = await threads.run(next, rest, b"")

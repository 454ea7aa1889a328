"""Sources: the users' archives come in here, are checked, and go to S3 under their own digest."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from typing import BinaryIO, cast

from fastapi import Request

from control_plane.api import deps, schemas
from control_plane.api.archive import RefusedArchive, inspect
from control_plane.api.auth import Caller, Reader, User
from control_plane.api.deps import Router, Services, ServicesDep, SourceIdPath
from control_plane.api.errors import InvalidRequest, TooLarge
from control_plane.api.schemas import FieldError
from control_plane.db import sources
from control_plane.db.sources import SourceRecord
from everstep.protocol.plan import ObjectReference

router = Router(prefix="/v1/sources", tags=["Sources"])

IN_MEMORY_BYTES = 1024 * 1024
"""Archives up to this size never touch the disk of the control plane."""


@router.put("/{SourceId}", operation_id="PutSource", openapi_extra=deps.binary_body("application/gzip"))
async def put_source(source_id: SourceIdPath, request: Request, caller: User, services: ServicesDep) -> schemas.PutSourceResponse:
    """Store a gzipped tar of a user's code. `SourceId` is its SHA-256; storing it again changes nothing."""
    limit = services.source_limits.archive_bytes
    with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES, dir=str(services.spool_directory)) as spool:
        digest = hashlib.sha256()
        received = 0
        async for chunk in request.stream():
            received += len(chunk)
            if received > limit:
                raise TooLarge(f"The archive is longer than {limit} bytes.", hint="Leave data and build results out of the source directory.")
            digest.update(chunk)
            await asyncio.to_thread(spool.write, chunk)
        if digest.hexdigest() != source_id:
            message = f"the body's SHA-256 is {digest.hexdigest()}; the archive was changed or cut on its way ({received} bytes came)"
            raise InvalidRequest(f"The source is refused: {message}.", fields=[FieldError(field="SourceId", message=message)])
        spool.seek(0)
        return await asyncio.to_thread(_store, services, caller, source_id, cast(BinaryIO, spool), received)


@router.get("/{SourceId}", operation_id="DescribeSource")
def describe_source(source_id: SourceIdPath, _caller: Reader, services: ServicesDep) -> schemas.PutSourceResponse:
    """Say whether a source is stored already, so that nobody uploads it twice."""
    with services.database.read() as session:
        return _shown(sources.get(session, source_id))


def _store(services: Services, caller: Caller, source_id: str, file: BinaryIO, archive_bytes: int) -> schemas.PutSourceResponse:
    try:
        contents = inspect(file, archive_bytes, services.source_limits)
    except RefusedArchive as error:
        message = str(error)
        raise InvalidRequest(f"The source is refused: {message}.", fields=[FieldError(field="Body", message=message)]) from error
    reference = ObjectReference(bucket=services.bucket, key=f"sources/{source_id}.tar.gz")
    file.seek(0)
    services.objects.put_file(reference, file)
    with services.database.write() as session:
        record = sources.add(
            session,
            SourceRecord(
                sha256=source_id,
                project=caller.choose_project(None),
                bucket=reference.bucket,
                key=reference.key,
                archive_bytes=archive_bytes,
                unpacked_bytes=contents.unpacked_bytes,
                files=contents.files,
                created_at=services.now(),
            ),
        )
    return _shown(record)


def _shown(record: SourceRecord) -> schemas.PutSourceResponse:
    return schemas.PutSourceResponse(source_id=record.sha256, bytes=record.archive_bytes, file_count=len(record.files))

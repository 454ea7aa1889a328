"""Checks source archives and stores them in S3 under their digest.

    CreateSource     returns a presigned S3 URL for this digest and length, or IsStored if the source exists
    CompleteSource   reads the upload back, hashes and checks it, stores it, and deletes the upload
    PutSource        uploads the archive through the service, if the client cannot reach S3 or the store cannot presign

CompleteSource deletes an invalid upload. `loop.upload_keeper` deletes uploads that no client completes.

Invariant: the database contains only sources whose archive this service has read and checked completely. Jobs can use
only these sources.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from datetime import timedelta
from typing import BinaryIO, cast

from fastapi import Request

from control_plane.api import deps
from control_plane.api.archive import ArchiveTooLarge, RefusedArchive, inspect_apart, turn_of
from control_plane.api.auth import Caller, Reader, User
from control_plane.api.caller_threads import UPLOAD_BYTES_PER_SECOND
from control_plane.api.deps import Services, ServicesDep, SourceIdPath
from control_plane.api.errors import InUse, InvalidRequest, TooLarge, Unavailable
from control_plane.api.router import Router
from control_plane.api.schemas import sources as sources_schemas
from control_plane.cloud.errors import CloudError, NotFound
from control_plane.db import quotas, sources
from control_plane.db.sources import SourceRecord
from control_plane.loop.upload_keeper import EXPIRY_CHECK_SECONDS, KEPT, PREFIX
from everstep.protocol.plan import ObjectReference

log = logging.getLogger(__name__)

router = Router(prefix="/v1/sources", tags=["Sources"])

IN_MEMORY_BYTES = 1024 * 1024
"""Archives up to this size stay in memory. The server writes larger archives to a temporary file."""
PIECE_BYTES = 1024 * 1024
"""Number of bytes that the server collects before a thread writes them to disk.

Applies to the part of an archive after its first `IN_MEMORY_BYTES`.
"""
LEAVE_OUT = (
    "Add data and results to the file .everstepignore of the source directory (patterns as in .gitignore), or move "
    "them elsewhere."
)
UPLOAD_SECONDS = 900
"""Lifetime of a presigned URL: enough for 256 MiB at 2.4 Mbit/s."""


@router.post("", operation_id="CreateSource")
def create_source(
    request: sources_schemas.CreateSourceRequest, caller: User, services: ServicesDep
) -> sources_schemas.CreateSourceResponse:
    """Request a presigned S3 URL for the upload of a source archive.

    The URL accepts only this archive and expires after fifteen minutes. If `IsStored` is true, no upload is needed. A
    repeated call returns another URL. Raises ValidationException if the archive is larger than the service allows.
    """
    if request.bytes > services.source_limits.archive_bytes:
        raise _too_long(services)
    if _known(services, request.source_id, caller) is not None:
        return sources_schemas.CreateSourceResponse(source_id=request.source_id, is_stored=True, upload=None)
    _keep_room(services, caller, request.source_id, request.bytes)
    expires_at = services.now() + timedelta(seconds=UPLOAD_SECONDS)
    signed = services.objects.sign_upload(
        _upload(services, caller, request.source_id),
        sha256=request.source_id,
        size_bytes=request.bytes,
        seconds=UPLOAD_SECONDS,
    )
    upload = (
        None
        if signed is None
        else sources_schemas.SourceUpload(url=signed.url, headers=dict(signed.headers), expiration_time=expires_at)
    )
    return sources_schemas.CreateSourceResponse(source_id=request.source_id, is_stored=False, upload=upload)


@router.post("/{SourceId}/completion", operation_id="CompleteSource")
async def complete_source(
    source_id: SourceIdPath, caller: User, services: ServicesDep
) -> sources_schemas.PutSourceResponse:
    """Check an archive that was uploaded to the URL of CreateSource. After that, jobs can use the source.

    Repeated calls change nothing. Raises ConflictException if no archive was uploaded. Raises ValidationException if
    the archive is too large or invalid, and then deletes the upload, unless it has another SHA-256 than `SourceId`.
    Raises ServiceUnavailableException if S3 returns only a part of the upload, and ThrottlingException while too many
    archives of the project arrive.
    """
    limit = services.source_limits.archive_bytes
    with services.spool_room.hold(caller.choose_project(None), limit, limit):
        return await services.caller_threads.run(_complete, services, caller, source_id)


def _complete(services: Services, caller: Caller, source_id: str) -> sources_schemas.PutSourceResponse:
    known = _known(services, source_id, caller)
    if known is not None:
        return _shown(known)
    upload, limit = _upload(services, caller, source_id), services.source_limits.archive_bytes
    try:
        size = services.objects.head(upload).size_bytes
        if size > limit:
            raise _too_long(services)
        with _spool(services) as spool:
            digest = hashlib.sha256()
            received = 0
            for chunk in services.objects.stream(upload):
                received += len(chunk)
                # Check again: the client may have replaced the upload with a larger object since the HEAD request.
                if received > limit:
                    raise _too_long(services)
                digest.update(chunk)
                spool.write(chunk)
            if received < size:
                raise Unavailable(f"S3 returned {received} of the {size} bytes of the upload.", hint="Retry.")
            _check_digest(source_id, digest.hexdigest(), received)
            spool.seek(0)
            taken = _store(services, caller, source_id, cast(BinaryIO, spool), received)
    except NotFound as error:
        known = _known(services, source_id, caller)
        if known is not None:  # Another CompleteSource call has completed this upload meanwhile.
            return _shown(known)
        raise InUse(
            "No archive was uploaded for this source yet.", hint="CreateSource returns the upload URL."
        ) from error
    except WrongDigest:
        raise  # S3 may have returned other bytes than it stores. The upload keeper deletes the upload later.
    except InvalidRequest:
        services.objects.delete(upload.bucket, [upload.key])
        raise
    try:
        services.objects.delete(upload.bucket, [upload.key])
    # Ignore the error, because the source is stored and the upload keeper deletes the upload later.
    except CloudError as error:
        log.warning("the upload of the source %s could not be deleted and is deleted later: %s", source_id, error)
    return taken


@router.put("/{SourceId}", operation_id="PutSource", openapi_extra=deps.binary_body("application/gzip"))
async def put_source(
    source_id: SourceIdPath, request: Request, caller: User, services: ServicesDep
) -> sources_schemas.PutSourceResponse:
    """Upload a gzipped tar of a user's code.

    `SourceId` is the SHA-256 of the archive. A call with an archive that is stored already changes nothing.
    Raises ValidationException if the archive is too large or invalid. Raises ConflictException if the project's quota
    has too little space, and ThrottlingException while too many archives of the project arrive.
    """
    limit = services.source_limits.archive_bytes
    announced = request.headers.get("content-length", "")
    wanted = int(announced) if announced.isdecimal() else limit
    if wanted > limit:
        raise _too_long(services)
    # Before the body is read: afterwards, it would already be on this server's disk.
    await services.caller_threads.run(_keep_room, services, caller, source_id, wanted)
    with services.spool_room.hold(caller.choose_project(None), wanted, limit), _spool(services) as spool:
        digest = hashlib.sha256()
        received = 0
        piece = bytearray()
        async for chunk in request.stream():
            received += len(chunk)
            if received > limit:
                raise _too_long(services)
            digest.update(chunk)
            await services.uploads.pay(len(chunk) / UPLOAD_BYTES_PER_SECOND)
            if received <= IN_MEMORY_BYTES:
                spool.write(chunk)
                continue
            piece += chunk
            if len(piece) >= PIECE_BYTES:
                await services.caller_threads.run(spool.write, piece)
                piece = bytearray()
        if piece:
            await services.caller_threads.run(spool.write, piece)
        _check_digest(source_id, digest.hexdigest(), received)
        spool.seek(0)
        return await services.caller_threads.run(_store, services, caller, source_id, cast(BinaryIO, spool), received)


@router.get("/{SourceId}", operation_id="DescribeSource")
def describe_source(
    source_id: SourceIdPath, caller: Reader, services: ServicesDep
) -> sources_schemas.PutSourceResponse:
    """Check whether a source is stored already, so that the client can skip the upload."""
    with services.database.read() as session:
        return _shown(sources.get(session, source_id, caller.project_filter))


def _store(
    services: Services, caller: Caller, source_id: str, file: BinaryIO, archive_bytes: int
) -> sources_schemas.PutSourceResponse:
    """Check an archive, store it in S3, and add it to the database. Blocks."""
    _keep_room(services, caller, source_id, archive_bytes)
    try:
        with turn_of(caller.choose_project(None)):
            contents = inspect_apart(file, archive_bytes, services.source_limits)
    except RefusedArchive as error:
        with services.database.write() as session:
            sources.remove_upload(session, source_id, caller.choose_project(None))
        message = str(error)
        raise InvalidRequest(
            f"The source was rejected: {message}.",
            fields=[("Body", message)],
            hint=LEAVE_OUT if isinstance(error, ArchiveTooLarge) else "",
        ) from error
    reference = _reference(services, caller, source_id)
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


def _keep_room(services: Services, caller: Caller, source_id: str, archive_bytes: int) -> None:
    """Reserve space for an archive in the project's quota. The reservation lasts as long as the upload may exist in S3.

    The function does nothing if the project has no limit.

    Args:
        services: provides the database and the time.
        caller: the archive belongs to the caller's project.
        source_id: SHA-256 of the archive. This reservation replaces an earlier reservation for the same archive.
        archive_bytes: size of the archive.

    Raises:
        InUse: the quota has too little space for the archive.
    """
    project, now = caller.choose_project(None), services.now()
    with services.database.write() as session:
        quota = quotas.find(session, project)
        if quota is None or quota.max_source_bytes is None:
            return
        used = sources.used_bytes(session, project, now, besides=source_id)
        if used + archive_bytes > quota.max_source_bytes:
            raise InUse(
                f"The project {project!r} uses {used} of {quota.max_source_bytes} bytes for sources; this "
                f"archive needs {archive_bytes}.",
                hint=f"{LEAVE_OUT} Or ask an administrator for a larger limit: everstep quotas set {project} "
                "--max-source-bytes ...",
            )
        expires_at = now + timedelta(seconds=UPLOAD_SECONDS + EXPIRY_CHECK_SECONDS) + KEPT
        sources.put_upload(session, source_id, project, archive_bytes=archive_bytes, now=now, expires_at=expires_at)


def _known(services: Services, source_id: str, caller: Caller) -> SourceRecord | None:
    """Return a stored source that the caller may use, or None.

    A source of another project must be uploaded again, because knowing a digest does not prove access to the code.
    """
    with services.database.read() as session:
        return sources.find(session, source_id, caller.project_filter)


def _reference(services: Services, caller: Caller, source_id: str) -> ObjectReference:
    key = f"projects/{caller.choose_project(None)}/sources/{source_id}.tar.gz"
    return ObjectReference(bucket=services.bucket, key=key)


def _upload(services: Services, caller: Caller, source_id: str) -> ObjectReference:
    """Return the S3 location to which a client uploads an archive.

    The service deletes this object after it has checked and stored the archive.

    Each project has its own prefix for uploads. With a common prefix, a project that knows the digest of an archive
    could complete another project's upload.
    """
    return ObjectReference(bucket=services.bucket, key=f"{PREFIX}{caller.choose_project(None)}/{source_id}.tar.gz")


def _spool(services: Services) -> tempfile.SpooledTemporaryFile[bytes]:
    return tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES, dir=str(services.spool_directory))


def _too_long(services: Services) -> TooLarge:
    limit = services.source_limits.archive_bytes
    return TooLarge(f"The archive is larger than {limit / 2**20:.4g} MiB ({limit} bytes).", hint=LEAVE_OUT)


class WrongDigest(InvalidRequest):
    """The archive has another SHA-256 than the request names."""


def _check_digest(source_id: str, found: str, received: int) -> None:
    if found != source_id:
        message = (
            f"the body's SHA-256 is {found}; the archive was changed or truncated during the upload ({received} "
            "bytes received)"
        )
        raise WrongDigest(f"The source was rejected: {message}.", fields=[("SourceId", message)])


def _shown(record: SourceRecord) -> sources_schemas.PutSourceResponse:
    return sources_schemas.PutSourceResponse(
        source_id=record.sha256, bytes=record.archive_bytes, file_count=len(record.files)
    )

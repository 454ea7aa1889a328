"""Operations that export a running job's state from memory: hold a snapshot, read it, and release it.

    HoldSnapshot     every agent of the job keeps the slots of one committed step from being overwritten
    ReadSnapshot     returns a range of one shard, which passes through this server
    ReleaseSnapshot  every agent may overwrite the slots again

Agents receive the news of a commit at different times. Each agent therefore first holds its newest committed step and
reports it. The server chooses the newest reported step, and every agent that reported an older step then holds this
step. The slots of such an agent already contain the step, because a commit needs the votes of all ranks.

A client that received no answer repeats HoldSnapshot with the same ClientRequestToken. The token determines the ids
under which agents store a hold. The agents therefore recognize the hold of the first request.

Invariant: all shards that a client reads under one snapshot id belong to one committed step of one generation. A
ClientRequestToken creates at most one hold, which never begins again after its end.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

from fastapi import Path, Query
from fastapi.responses import Response

from control_plane.api import deps
from control_plane.api.alike import shaped
from control_plane.api.auth import Caller, User
from control_plane.api.deps import Services, ServicesDep, TrainingJobNamePath
from control_plane.api.errors import InUse, Unavailable, invalid
from control_plane.api.router import Router
from control_plane.api.routes.jobs import find_job
from control_plane.api.schemas import common as common_schemas
from control_plane.api.schemas import snapshots as snapshots_schemas
from control_plane.core.states import JobState
from control_plane.db import events, jobs
from control_plane.db.jobs import SavedJob
from control_plane.loop.snapshot_desk import NoAnswer
from everstep.protocol.agent_messages import (
    ANOTHER_EXPORT,
    HOLD_SECONDS,
    MAX_SNAPSHOT_READ_BYTES,
    HoldSnapshot,
    ReadSnapshot,
    ReleaseSnapshot,
    SnapshotHeld,
)
from everstep.protocol.ids import Generation, NodeId, Rank, RunId, Step
from everstep.protocol.plan import PlanNode

router = Router(prefix="/v1/training-jobs/{TrainingJobName}/snapshots", tags=["Checkpoints"])

ATTEMPTS: Final = 3
"""Attempts to hold one step on all nodes. An attempt fails if a node overwrites its step between two requests."""
HOLD_BASE_DIGITS: Final = 31
"""Number of hexadecimal digits of a hold id that the ClientRequestToken determines.

The last digit is the number of the attempt.
"""
NEWEST: Final = Step(-1)
SnapshotIdPath = Annotated[str, Path(alias="SnapshotId", pattern=snapshots_schemas.SNAPSHOT_ID)]
RankPath = Annotated[int, Path(alias="Rank", ge=0, le=2**31 - 1)]
Begin = Annotated[int, Query(alias="Begin", ge=0, le=common_schemas.MAX_WHOLE_NUMBER)]
End = Annotated[int, Query(alias="End", ge=1, le=common_schemas.MAX_WHOLE_NUMBER)]


@router.post("", operation_id="HoldSnapshot")
async def hold_snapshot(
    training_job_name: TrainingJobNamePath,
    request: snapshots_schemas.HoldSnapshotRequest,
    caller: User,
    services: ServicesDep,
) -> snapshots_schemas.HoldSnapshotResponse:
    """Keep the newest committed step of a running job in memory, so that ReadSnapshot can read it.

    While a job without ThirdSlot holds a snapshot, it commits no further steps; training continues. The hold ends at
    ReleaseSnapshot, when the job stops or starts again, or HoldInSeconds after the last HoldSnapshot or ReadSnapshot.
    It also ends if AWS announces the end of a node and the job needs the memory for a checkpoint. A job holds one
    snapshot at a time.

    Raises ConflictException if the job is not running, has no committed step, holds another snapshot, or no longer
    holds the requested one. Raises ServiceUnavailableException if an agent is not connected to this server.
    """
    job, nodes = await services.caller_threads.run(_running, services, training_job_name, caller)
    if request.snapshot_id is not None:
        generation, step, nonce = _parts_of(request.snapshot_id)
        _require_generation(job, generation)
        answers = await _ask(services, job, nodes, nonce, step, is_renewal=True)
        refusal = next((answer.refusal for answer in answers.values() if answer.refusal), "")
        if refusal:
            raise InUse(
                f"The snapshot of step {step} of {job.name} is lost: {refusal}.", hint="Start the export again."
            )
    else:
        token = (
            f"{job.run_id}:{job.generation}:{caller.token.id}:{request.client_request_token or secrets.token_hex(16)}"
        )
        base = hashlib.sha256(token.encode()).hexdigest()[:HOLD_BASE_DIGITS]
        nonce, answers = await services.registry.snapshots.once(
            base, lambda: _begin(services, job, nodes, caller, base)
        )
    step = next(iter(answers.values())).step
    shards = sorted((shard for answer in answers.values() for shard in answer.shards), key=lambda shard: shard.rank)
    return snapshots_schemas.HoldSnapshotResponse(
        training_job_name=job.name,
        run_id=job.run_id,
        snapshot_id=f"{job.generation}-{step}-{nonce}",
        generation=job.generation,
        step=step,
        hold_in_seconds=int(HOLD_SECONDS),
        max_read_bytes=MAX_SNAPSHOT_READ_BYTES,
        shards=[
            shaped(
                shard,
                snapshots_schemas.HeldShard,
                payload_digest=shard.payload_digest.hex(),
                layout_hash=shard.layout_hash.hex(),
            )
            for shard in shards
        ],
    )


@router.get(
    "/{SnapshotId}/shards/{Rank}",
    operation_id="ReadSnapshot",
    response_class=Response,
    responses=deps.binary_answer("application/octet-stream"),
)
async def read_snapshot(
    training_job_name: TrainingJobNamePath,
    snapshot_id: SnapshotIdPath,
    rank: RankPath,
    begin: Begin,
    end: End,
    caller: User,
    services: ServicesDep,
) -> Response:
    """Read the bytes from Begin to End, exclusive, of a shard that its node has kept since HoldSnapshot.

    The shard has the format of a checkpoint object in S3. The bytes pass through this server. Each read extends the
    hold, so the caller needs the same role as for HoldSnapshot.

    Raises ValidationException if the range is empty or too large, or if the job has no such rank. Raises
    ConflictException if the snapshot is no longer held. Raises ServiceUnavailableException if the agent is not
    connected to this server or does not answer.
    """
    if not begin < end <= begin + MAX_SNAPSHOT_READ_BYTES:
        raise invalid("End", f"must be from 1 to {MAX_SNAPSHOT_READ_BYTES} bytes after Begin", "{field} {message}.")
    generation, step, nonce = _parts_of(snapshot_id)
    job, nodes = await services.caller_threads.run(_running, services, training_job_name, caller)
    _require_generation(job, generation)
    node = next((node for node in nodes if rank in node.ranks), None)
    if node is None:
        raise invalid("Rank", f"is not a rank of {job.name}", "{field} {message}.")
    wanted = ReadSnapshot(
        run=RunId(job.run_id),
        generation=Generation(job.generation),
        request_id=secrets.token_hex(16),
        hold_id=nonce,
        rank=Rank(rank),
        begin=begin,
        end=end,
    )
    try:
        answer = await services.registry.snapshots.read(node.node_id, wanted)
    except NoAnswer as error:
        raise Unavailable(f"The snapshot cannot be read: {error}.", hint="Retry in a moment.") from None
    if answer.refusal or len(answer.data) != end - begin:
        why = answer.refusal or f"the agent of {node.node_id} returned {len(answer.data)} bytes"
        raise InUse(f"Step {step} of rank {rank} cannot be read: {why}.", hint="Start the export again.")
    return Response(answer.data, media_type="application/octet-stream", headers={"x-content-type-options": "nosniff"})


@router.delete("/{SnapshotId}", operation_id="ReleaseSnapshot")
async def release_snapshot(
    training_job_name: TrainingJobNamePath, snapshot_id: SnapshotIdPath, caller: User, services: ServicesDep
) -> snapshots_schemas.ReleaseSnapshotResponse:
    """End the hold of a snapshot, so that the job may overwrite it. Repeated calls change nothing."""
    generation, _, nonce = _parts_of(snapshot_id)
    job, nodes = await services.caller_threads.run(_members, services, training_job_name, caller)
    if job.generation == generation:
        # A HoldSnapshot call sends agents one request per attempt, each with its own id. Release the ids of all
        # attempts, so that a delayed request does not make an agent keep the snapshot again.
        for each in _attempts(nonce[:HOLD_BASE_DIGITS]):
            _release(services, job, nodes, each)
    return snapshots_schemas.ReleaseSnapshotResponse(snapshot_id=snapshot_id)


def _attempts(base: str) -> list[str]:
    """Return the ids of the requests to agents to keep a snapshot: one id per attempt of one HoldSnapshot call."""
    return [f"{base}{attempt:x}" for attempt in range(ATTEMPTS)]


def _parts_of(snapshot_id: str) -> tuple[int, Step, str]:
    generation, step, nonce = snapshot_id.split("-")
    return int(generation), Step(int(step)), nonce


def _members(services: Services, name: str, caller: Caller) -> tuple[SavedJob, Sequence[PlanNode]]:
    """Return a job and the nodes of its newest generation. Blocks on the database."""
    with services.database.read() as session:
        job = find_job(session, name, caller)
        if not job.generation:
            return job, ()
        return job, jobs.generation(session, job.run_id, job.generation).plan.nodes


def _running(services: Services, name: str, caller: Caller) -> tuple[SavedJob, Sequence[PlanNode]]:
    job, nodes = _members(services, name, caller)
    if job.state != JobState.RUNNING:
        raise InUse(
            f"The training job {job.name!r} is {job.state}; only a running job has a snapshot to export.",
            hint=f"Export a checkpoint from S3: everstep checkpoints list {job.name}",
        )
    return job, nodes


def _require_generation(job: SavedJob, generation: int) -> None:
    if job.generation != generation:
        raise InUse(
            f"{job.name} has started again since the snapshot was held, so the snapshot is lost.",
            hint="Start the export again.",
        )


async def _begin(
    services: Services, job: SavedJob, nodes: Sequence[PlanNode], caller: Caller, base: str
) -> tuple[str, Mapping[NodeId, SnapshotHeld]]:
    """Hold the newest committed step on all nodes, and record an event.

    Return the id of the hold, and the answer of each agent. A repeated call with the same `base`, the beginning of the
    hold ids, returns the same hold.
    """
    refusal, desk = "no node answered", services.registry.snapshots
    for nonce in _attempts(base):
        is_held = False
        try:
            answers = dict(await _ask(services, job, nodes, nonce, NEWEST))
            newest = max((answer.step for answer in answers.values()), default=NEWEST)
            behind = [node for node in nodes if answers[node.node_id].step != newest]
            if newest != NEWEST and not any(answer.refusal for answer in answers.values()):
                answers |= await _ask(services, job, behind, nonce, newest)
            refusal = next((answer.refusal for answer in answers.values() if answer.refusal), "")
            ranks = sorted(shard.rank for answer in answers.values() for shard in answer.shards)
            expected = sorted(rank for node in nodes for rank in node.ranks)
            if not refusal and ranks == expected and {answer.step for answer in answers.values()} == {newest}:
                if not desk.has_begun(nonce):
                    await services.caller_threads.run(_note, services, job, caller, newest)
                    desk.note_begun(nonce)
                is_held = True
        finally:
            if not is_held:
                _release(services, job, nodes, nonce)
        if is_held:
            return nonce, answers
    if refusal == ANOTHER_EXPORT:
        raise InUse(
            f"{job.name} already holds a snapshot for another export, and a job has one export from memory at a time.",
            hint=f"Wait until that export ends: it ends {HOLD_SECONDS:.0f} s after its last request at the latest. "
            f"everstep events list --job {job.name} names who began it.",
        )
    raise InUse(
        f"The snapshot of {job.name} cannot be held: {refusal or 'the nodes hold different steps'}.",
        hint="Retry in a moment.",
    )


async def _ask(
    services: Services,
    job: SavedJob,
    nodes: Sequence[PlanNode],
    nonce: str,
    step: Step,
    *,
    is_renewal: bool = False,
) -> Mapping[NodeId, SnapshotHeld]:
    async def ask(node: PlanNode) -> SnapshotHeld:
        wanted = HoldSnapshot(
            run=RunId(job.run_id),
            generation=Generation(job.generation),
            request_id=secrets.token_hex(16),
            hold_id=nonce,
            step=step,
            is_renewal=is_renewal,
        )
        return await services.registry.snapshots.hold(node.node_id, wanted)

    found = await asyncio.gather(*(ask(node) for node in nodes), return_exceptions=True)
    answers: dict[NodeId, SnapshotHeld] = {}
    for node, answer in zip(nodes, found, strict=True):
        if isinstance(answer, NoAnswer):
            raise Unavailable(f"The snapshot cannot be held: {answer}.", hint="Retry in a moment.") from None
        if isinstance(answer, BaseException):
            raise answer
        answers[node.node_id] = answer
    return answers


def _release(services: Services, job: SavedJob, nodes: Sequence[PlanNode], nonce: str) -> None:
    wanted = ReleaseSnapshot(run=RunId(job.run_id), generation=Generation(job.generation), hold_id=nonce)
    for node in nodes:
        services.registry.snapshots.release(node.node_id, wanted)


def _note(services: Services, job: SavedJob, caller: Caller, step: int) -> None:
    message = f"{caller.name} holds step {step} of {job.name} in memory for an export."
    with services.database.write() as session:
        events.append_for_job(session, job, "SnapshotHeld", message, services.now())

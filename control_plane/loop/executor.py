"""Executes the actions of decisions: sends messages to agents, calls AWS, and writes manifests to S3.

Before a call that changes AWS or S3, the executor stores an *intent* under the lease, and afterwards its outcome. It
does not repeat a call whose intent is done.

Invariant: no database session is open during a call. Intents and log lines contain no secrets.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

from sqlalchemy.orm import Session

from control_plane.accounts import reasons
from control_plane.cloud.errors import CloudError, NotFound, ObjectChanged
from control_plane.cloud.objects import has_content
from control_plane.cloud.operator import Launched
from control_plane.core.actions import (
    LAUNCH_CALL,
    CompleteTermination,
    FleetAction,
    GroupAction,
    HoldTermination,
    JobAction,
    LaunchInstances,
    MemberAction,
    ProtectMembers,
    PutManifest,
    RebootMember,
    ResumeLaunch,
    RetryLaunch,
    Send,
    SendKeepEvidence,
    SendLoad,
    SetDesired,
    TerminateMember,
    reboot_key,
)
from control_plane.core.capacity import LONGEST_RETRY_SECONDS
from control_plane.core.observed.drills import DrillKind, DrillObserved
from control_plane.core.states import NodeState
from control_plane.db import automation, checkpoints, events, implications, incidents, intents, jobs, nodes, notices
from control_plane.db.errors import NotFound as NoSuchRow
from control_plane.db.errors import StaleLease
from control_plane.db.intents import IntentState
from control_plane.db.leases import Lease
from control_plane.loop.context import LoopContext
from control_plane.loop.last_logs import LastLogs, evidence_key
from everstep.protocol.agent_messages import KeepEvidence, KillForDrill, Load
from everstep.protocol.errors import ProtocolError
from everstep.protocol.ids import Generation, NodeId, RunId
from everstep.protocol.manifest import CheckpointManifest, decode_manifest, encode_manifest
from everstep.protocol.plan import ObjectReference

log = logging.getLogger(__name__)

T = TypeVar("T")

MANIFEST_SECONDS = 1.0
"""Seconds that each manifest costs its run. The database stores every manifest, and the rows of deleted checkpoints."""
OBJECTS_PER_SECOND = 1_000
"""Objects that a manifest names per second of this cost, if it names more."""
MANIFEST_BURST_SECONDS = 1_000.0
"""Seconds of this cost that a run can use at once: a job with a checkpoint per second never waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that changes AWS or S3, with the key, name and arguments that the executor stores before the call."""

    key: str
    name: str
    detail: dict[str, object]
    make: Callable[[], object]


def generation_key(secret: bytes, run: RunId, generation: Generation) -> bytes:
    """Return the key (32 bytes) with which the agents of one generation authenticate each other."""
    # The key is not stored, so a restarted server derives and sends the same key.
    return hmac.new(secret, f"{run}/{generation}".encode(), hashlib.sha256).digest()


class Executor:
    """Executes the decisions' actions. `renewed` returns a job's or fleet's lease as it was last renewed."""

    def __init__(self, context: LoopContext, renewed: Callable[[Lease], Lease]) -> None:
        self._context = context
        self._renewed = renewed
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._paid_until: dict[RunId, float] = {}
        """Monotonic seconds to which each run's manifests have used up its rate."""
        self._last_logs = LastLogs(context)

    def send(self, action: JobAction | FleetAction) -> None:
        """Queue the message of an action for its agent, if it is connected. The loops repeat lost messages."""
        match action:
            case Send(node_id, message):
                self._context.registry.send(node_id, message)
            case SendLoad(node_id=node_id, plan=plan):
                self._context.registry.send(
                    node_id, Load(plan=plan, key=generation_key(self._context.secret, plan.run, plan.generation))
                )
            case _:
                pass

    def put_manifest(self, lease: Lease, action: PutManifest) -> None:
        """Start to write a manifest to S3 and its checkpoint to the database, unless this work is in progress."""
        key = f"manifest/{action.manifest.run}/{action.manifest.generation}/{action.manifest.step}"
        if key not in self._under_way and self._has_turn(action.manifest):
            self.begin_work(key, lambda: self._put(lease, key, action))

    def _has_turn(self, manifest: CheckpointManifest) -> bool:
        """Return whether a run may write a manifest now, and count it. A later pass decides again."""
        now = self._context.monotonic()
        seconds = max(1, len(manifest.shards) + len(manifest.shared)) / OBJECTS_PER_SECOND
        paid_until = max(self._paid_until.get(manifest.run, float("-inf")), now - MANIFEST_BURST_SECONDS)
        paid_until += max(MANIFEST_SECONDS, seconds)
        if paid_until > now:
            return False
        self._paid_until[manifest.run] = paid_until
        for run in [run for run, until in self._paid_until.items() if until < now - MANIFEST_BURST_SECONDS]:
            del self._paid_until[run]
        return True

    def keep_evidence(self, lease: Lease, action: SendKeepEvidence) -> None:
        """Let the agent of a node that a person will inspect store its logs in S3, and note that they are stored."""
        key = evidence_key(action.node_id)
        view = self._context.registry.view(action.node_id)
        if view is not None and view.report is not None and view.report.evidence_key == key:
            self.begin_work(key, lambda: self._note_evidence(lease, action.node_id, key))
        else:
            self._context.registry.send(
                action.node_id, KeepEvidence(place=ObjectReference(bucket=self._context.bucket, key=key))
            )

    def change_group(self, lease: Lease, actions: Sequence[GroupAction], changed: Callable[[], None]) -> None:
        """Start to apply changes to a fleet's group in order, or drop them while earlier ones are in progress.

        The executor calls `changed` before and after each change of the members, to invalidate older answers of AWS.
        """
        if actions:
            self.begin_work(f"group/{lease.key}", lambda: self._change_group(lease, actions, changed))

    def strike(self, run: RunId, group: str, drill: DrillObserved) -> None:
        """Start to inject the fault of a drill. The executor does not retry a failed message or call."""
        # The caller has already stored the state STRUCK, so the fault is injected at most once.
        if drill.kind is DrillKind.TERMINATE_INSTANCE:
            self.begin_work(f"drill/{drill.id}", lambda: self._strike_member(group, drill))
            return
        message = KillForDrill(run=run, generation=drill.generation, drill=drill.id, rank=drill.rank)
        if not self._context.registry.send(drill.node_id, message):
            log.warning("drill %s: no fault was injected: the agent of %s is not connected", drill.id, drill.node_id)

    async def close(self) -> None:
        """Wait until all background work has ended."""
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    def begin_work(self, key: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Start background work, unless the work with this key is in progress."""
        if key not in self._under_way:
            task = asyncio.create_task(self._do(key, work))
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))

    async def _do(self, key: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        try:
            await work()
        except Exception:
            log.exception("%s failed; the next pass decides it again", key)

    def _call(self, action: GroupAction) -> Call:
        """Return the AWS API call that executes an action, with its idempotency key."""
        operator, group, now = self._context.operator, action.group, self._context.now()
        minute = int(now.timestamp() // 60)

        def call(key: str, name: str, make: Callable[[], object], **detail: object) -> Call:
            return Call(key=key, name=name, detail={"group": group, **detail}, make=make)

        # Most keys contain the current minute, so the executor repeats a call that shows no effect after a minute. The
        # key of a reboot does not change, so a reboot is requested only once.
        match action:
            case SetDesired(desired_count=desired):
                key = f"set-desired/{group}/{desired}/{now.isoformat(timespec='milliseconds')}"
                make = partial(operator.set_desired, group, desired)
                return call(key, "SetDesiredCapacity", make, desired_count=desired)
            case LaunchInstances(key=key, count=count, desired_count=desired, zone=zone):
                token = hashlib.sha256(key.encode()).hexdigest()  # Keys are longer than the 64 characters of a token.
                launch = partial(operator.launch_instances, group, count, zone=zone, token=token)
                return call(key, LAUNCH_CALL, launch, count=count, desired_count=desired, zone=zone)
            case TerminateMember(node_id=node_id, decrement=decrement):
                key, why = f"terminate/{node_id}/{minute}", reasons.sentence(action.reason)
                make = partial(operator.terminate_member, node_id, decrement=decrement)
                name = "TerminateInstanceInAutoScalingGroup"
                return call(key, name, make, node_id=node_id, decrement=decrement, reason=why)
            case RebootMember(node_id=node_id, since=since):
                make, why = partial(operator.reboot_member, group, node_id), reasons.sentence(action.reason)
                return call(reboot_key(node_id, since), "RebootInstances", make, node_id=node_id, reason=why)
            case CompleteTermination(hook=hook, node_id=node_id):
                key = f"complete/{node_id}/{hook}/{minute}"
                make = partial(operator.complete_termination, group, hook, node_id)
                return call(key, "CompleteLifecycleAction", make, hook=hook, node_id=node_id)
            case RetryLaunch(desired_count=desired, failed_at=failed_at):
                key, why = f"retry-launch/{group}/{failed_at}", "a launch has failed"
                make = partial(operator.set_desired, group, desired)
                return call(key, "SetDesiredCapacity", make, desired_count=desired, reason=why)
            case ResumeLaunch(reason=reason):
                key = f"resume-launch/{group}/{int(now.timestamp() // LONGEST_RETRY_SECONDS)}"
                make = partial(operator.resume_processes, group, ["Launch"])
                return call(key, "ResumeProcesses", make, processes=["Launch"], reason=reason)
            case ProtectMembers(node_ids=node_ids):
                key = f"protect/{group}/{node_ids[0]}/{len(node_ids)}/{minute}"
                make = partial(operator.protect_members, group, node_ids)
                return call(key, "SetInstanceProtection", make, node_ids=list(node_ids))
            case HoldTermination(hook=hook, node_id=node_id, seconds=seconds):
                # The executor makes one call per key, even if the call fails. The key changes three times within the
                # timeout of the lifecycle hook, so after a failed call another one still comes in time.
                key = f"hold/{node_id}/{hook}/{int(now.timestamp() // (seconds / 3))}"
                make = partial(self._hold, action)
                return call(key, "RecordLifecycleActionHeartbeat", make, hook=hook, node_id=node_id)

    def _hold(self, action: HoldTermination) -> None:
        until = self._context.now() + timedelta(seconds=action.seconds)
        self._context.operator.hold_termination(action.group, action.hook, action.node_id)
        with self._context.database.write() as session:
            notices.hold(session, action.node_id, until)

    async def _strike_member(self, group: str, drill: DrillObserved) -> None:
        try:
            await asyncio.to_thread(self._context.operator.strike_member, group, drill.node_id)
        except CloudError as error:
            log.warning("drill %s: could not terminate the instance: %s", drill.id, error)

    async def _change_group(self, lease: Lease, actions: Sequence[GroupAction], changed: Callable[[], None]) -> None:
        for action in actions:
            is_end = isinstance(action, TerminateMember | CompleteTermination)
            if is_end and not await self._last_logs.may_end(action.node_id):  # type: ignore[union-attr]
                continue  # The node still uploads logs. A later decision about the fleet terminates the instance.
            try:
                if isinstance(action, MemberAction):
                    # Invalidate AWS's answers before and after the call: a concurrent poll may return the older state.
                    changed()
                    await self._change(lease, action)
                    changed()
                else:
                    # Each decision about the fleet repeats this action. The stored intent prevents a second AWS call.
                    await self._change(lease, action)
            except StaleLease as stale:
                log.info("fleet %s: %s", lease.key, stale)
                return

    async def _change(self, lease: Lease, action: GroupAction) -> None:
        call = self._call(action)
        intent = await asyncio.to_thread(self._under, lease, partial(self._begin_automatic, call))
        if intent is None or intent.state is not IntentState.OPEN:
            return
        try:
            answer = await asyncio.to_thread(self._make, call)
        except NotFound as gone:
            await asyncio.to_thread(self._finish, lease, call, IntentState.DONE, f"nothing left to do: {gone}")
        except CloudError as error:
            log.warning("%s %s: %s", call.name, call.key, error)
            if not error.retryable:
                await asyncio.to_thread(self._finish, lease, call, IntentState.FAILED, str(error))
        else:
            outcome = str(answer) if isinstance(answer, Launched) else "done"
            await asyncio.to_thread(self._finish, lease, call, IntentState.DONE, outcome)

    async def _put(self, lease: Lease, key: str, action: PutManifest) -> None:
        manifest = action.manifest
        body = await asyncio.to_thread(encode_manifest, manifest)
        detail: dict[str, object] = {"bucket": action.at.bucket, "key": action.at.key}
        call = Call(key=key, name="PutManifest", detail=detail, make=lambda: self._write(lease, call, action.at, body))
        try:
            await asyncio.to_thread(decode_manifest, body)
            intent = await asyncio.to_thread(self._begin, lease, call)
            if intent.state is IntentState.OPEN:
                await asyncio.to_thread(call.make)
            await asyncio.to_thread(self._under, lease, partial(self._record, call, action, body))
        except CloudError as error:
            log.warning(
                "job %s: could not write the manifest of step %d to S3; the next pass retries: %s",
                manifest.job,
                manifest.step,
                error,
            )
        except StaleLease:
            log.info(
                "job %s: another control-plane server records the checkpoint of step %d", manifest.job, manifest.step
            )
        except ProtocolError as error:
            with suppress(StaleLease):
                await asyncio.to_thread(self._under, lease, partial(self._refuse, action, str(error)))
            return  # Do not call `hint`: the woken loops would only try to write this invalid manifest again.
        self._context.registry.hint()

    def _write(self, lease: Lease, call: Call, at: ObjectReference, body: bytes) -> None:
        """Write a manifest to S3, unless another server has taken the job over and written its own manifest. Blocks."""
        # A server that hung may call this after it has lost the lease. It may replace only a manifest whose ETag it
        # read before it checked the lease.
        try:
            self._context.objects.put_if_unchanged(at, body)
        except ObjectChanged:
            etag = self._context.objects.head(at).etag
            if has_content(self._context.objects, at, body):
                return  # An earlier attempt wrote the manifest, but S3's answer or the record in the database was lost.
            if self._begin(lease, call).state is IntentState.OPEN:
                self._context.objects.put_if_unchanged(at, body, etag=etag)

    async def _note_evidence(self, lease: Lease, node_id: NodeId, key: str) -> None:
        def note(session: Session, lease: Lease) -> None:
            now = self._context.now()
            nodes.change(session, lease, node_id, initial_state=NodeState.HELD, now=now, evidence_at=now)
            message = f"the logs of {node_id} are kept in s3://{self._context.bucket}/{key}"
            events.add(session, "EvidenceKept", message, now, fleet_name=lease.key, node_id=node_id)

        try:
            await asyncio.to_thread(self._under, lease, note)
        except (StaleLease, NoSuchRow) as stale:
            log.info("node %s: %s", node_id, stale)
        self._context.registry.hint()

    def _under(self, lease: Lease, write: Callable[[Session, Lease], T]) -> T:
        """Run `write` in one transaction, under the version of `lease` that this server renewed last. Blocks."""
        # The loop may renew the lease during an AWS call, so the caller's copy may be stale.
        while True:
            held = self._renewed(lease)
            try:
                with self._context.database.write() as session:
                    return write(session, held)
            except StaleLease:
                if self._renewed(lease) == held:
                    raise  # This server has not renewed the lease meanwhile, so another server took the lease over.

    def _begin(self, lease: Lease, call: Call) -> intents.IntentRecord:
        return self._under(
            lease, partial(intents.begin, key=call.key, action=call.name, detail=call.detail, now=self._context.now())
        )

    def _make(self, call: Call) -> object:
        if not self._context.tracer.is_recording:
            return call.make()
        node_id = str(call.detail.get("node_id", ""))
        with self._context.database.read() as session:
            history = implications.of_node(session, node_id)
            incident = incidents.find(session, history[-1].incident_id) if history else None
        begun, failure = self._context.now().timestamp(), ""
        try:
            return call.make()
        except CloudError as error:
            failure = str(error)
            raise
        finally:
            run_id, ended = incident.run_id if incident is not None else "", self._context.now().timestamp()
            self._context.tracer.record(call.name, run_id, begun, ended, {"node_id": node_id, "key": call.key}, failure)

    def _begin_automatic(self, call: Call, session: Session, lease: Lease) -> intents.IntentRecord | None:
        """Store the intent of a call that changes a group. Return None while automation is paused."""
        # One transaction checks the pause and stores the intent, so no intent is stored after a pause was stored.
        if automation.find(session) is not None:
            log.info("fleet %s: %s is not called, because automation is paused", lease.key, call.name)
            return None
        return intents.begin(
            session, lease, key=call.key, action=call.name, detail=call.detail, now=self._context.now()
        )

    def _finish(self, lease: Lease, call: Call, state: IntentState, outcome: str) -> None:
        self._under(lease, partial(intents.finish, key=call.key, state=state, outcome=outcome, now=self._context.now()))

    def _refuse(self, action: PutManifest, error: str, session: Session, lease: Lease) -> None:
        """Store an event, once per step, about a manifest that is invalid because agents reported invalid shards."""
        now, manifest = self._context.now(), action.manifest
        # The key differs from that of the write, so a later manifest of valid shards of the same step can still be
        # written.
        key = f"manifest/{manifest.run}/{manifest.generation}/{manifest.step}/refused"
        intent = intents.begin(session, lease, key=key, action="PutManifest", detail={"key": action.at.key}, now=now)
        if intent.state is not IntentState.OPEN:
            return
        intents.finish(session, lease, key=key, state=IntentState.FAILED, outcome=error, now=now)
        job = jobs.get_run(session, lease.key)
        message = (
            f"The checkpoint of step {manifest.step} was refused, because agents reported invalid shards: {error}. "
            "Check that all agents run the same version of Everstep."
        )
        log.error("job %s: %s", manifest.job, message)
        events.append_for_job(session, job, "CheckpointRefused", message, now)

    def _record(self, call: Call, action: PutManifest, body: bytes, session: Session, lease: Lease) -> None:
        now = self._context.now()
        manifest = action.manifest
        total = sum(shard.object_bytes for shard in manifest.shards)
        total += sum(each.object_bytes for each in manifest.replicated)
        checkpoint = checkpoints.SavedCheckpoint(
            generation=manifest.generation,
            step=manifest.step,
            state=checkpoints.COMPLETE,
            bucket=action.at.bucket,
            manifest_key=action.at.key,
            manifest=body,
            object_bytes=total,
            created_at=now,
            completed_at=now,
        )
        is_new = checkpoints.record(session, lease, checkpoint)
        intents.finish(session, lease, key=call.key, state=IntentState.DONE, outcome="done", now=now)
        if not is_new:
            return
        job = jobs.get_run(session, lease.key)
        message = f"checkpoint of step {manifest.step} is complete: {len(manifest.shards)} shards, {total:,} bytes"
        events.append_for_job(session, job, "CheckpointCompleted", message, now)

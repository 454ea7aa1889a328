"""Errors that the agent's modules raise. "Retryable" means that the same call may succeed later.

    WorkerError
    ├── NoRoom                   memory for slots is exhausted (with the sizes)
    ├── PeerError                a connection to another agent failed
    │   ├── PeerLost             closed, timed out, or no answer: retryable
    │   └── PeerRefused          the other side rejects this node, its key or its generation: retryable
    │       └── OtherGeneration  the session belongs to another generation of this node's run than the running one
    ├── AttestationFailed        the instance could not prove its identity: retryable
    ├── SourceRefused            the user's source archive contradicts the plan, or is not safe to unpack
    ├── InputRefused             an input channel of the job cannot be provided on this node; with `retryable`
    ├── LoadFailed               this node cannot load the generation; with a code and `is_permanent`
    ├── RequirementsRefused      the job's requirements.txt cannot be installed on this node
    ├── StubRefused              simulated GPUs were requested outside a local cluster
    ├── SupervisorError
    │   ├── ShimUnavailable      the node's shim cannot be started or reached
    │   └── RanksNotGone         processes of an older generation still run after the deadline
    ├── UserRefused              ranks cannot run as the configured user
    └── StorageError             a call to an object store failed; `retryable`: the same call may succeed later
        ├── StoreUnavailable     no answer, a time-out, throttling or a 5xx: retryable
        ├── ObjectMissing        the bucket or key does not exist
        │   └── BucketMissing    the bucket does not exist
        ├── StoreDenied          the credentials do not allow the call
        ├── StoreRefused         the request itself is wrong
        ├── ForbiddenEndpoint    local mode and an endpoint that is not loopback; nothing was sent
        ├── ObjectChanged        the object was replaced after its listing: retryable with a new listing
        └── CorruptCheckpoint    the object is damaged, or is not the object that the plan names

Callers decide by the type of an error whether to retry.
"""

from __future__ import annotations

from typing import ClassVar

from everstep.protocol.agent_messages import Obstacle
from everstep.protocol.plan import ObjectReference


class WorkerError(Exception):
    """Base class of the errors that the agent's modules raise."""

    retryable: bool = False


class AttestationFailed(WorkerError):
    """The instance could not prove its identity to the control plane."""

    retryable = True


class NoRoom(WorkerError):
    """The node has too little memory for a slot. `is_passing`: other processes use it now, so a retry may succeed."""

    def __init__(self, *, needed_bytes: int, available_bytes: int, is_passing: bool = False) -> None:
        whose = " available: other processes use the memory" if is_passing else " there"
        super().__init__(f"slots need {needed_bytes:,} bytes of host memory and {available_bytes:,} bytes are{whose}")
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.is_passing = is_passing


class PeerError(WorkerError):
    """A connection to another agent failed."""

    retryable = True


class PeerLost(PeerError):
    """The connection to another node was closed or timed out, or the node never answered."""


class PeerRefused(PeerError):
    """The other node rejects this node, its key or its generation."""


class OtherGeneration(PeerRefused):
    """The session belongs to a generation of this node's run that has ended here or is not loaded yet."""


class StubRefused(WorkerError):
    """Simulated GPUs were configured outside a local cluster."""


class SourceRefused(WorkerError):
    """The user's source archive differs from the archive that the plan names, or is not safe to unpack."""


class LoadFailed(WorkerError):
    """This node cannot load the generation. `code` is the type of the fault that the agent reports.

    `obstacle` states why a store did not deliver an input, if the same load may succeed later. `place` is the S3 object
    that the store did not deliver, if it is known.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        is_permanent: bool,
        obstacle: Obstacle | None = None,
        place: ObjectReference | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.is_permanent = is_permanent
        self.obstacle = obstacle
        self.place = place

    @classmethod
    def lacking(
        cls,
        parent: int,
        code: str,
        message: str,
        cause: StorageError | InputRefused | None = None,
        place: ObjectReference | None = None,
    ) -> LoadFailed:
        """Return the error for an input that a job needs and that this node cannot provide.

        `parent` is that of the generation. `cause` is None for causes that last.
        """
        # At the first start of a job, its request is probably wrong. A job that has trained before may find the input
        # on another node.
        is_permanent = not parent and not (cause is not None and cause.retryable)
        obstacle = cause.obstacle if cause is not None else None
        return cls(code, message, is_permanent=is_permanent, obstacle=obstacle, place=place)


class InputRefused(WorkerError):
    """An input channel of the job cannot be provided on this node. `obstacle` is that of the store's error."""

    def __init__(self, message: str, *, retryable: bool = False, obstacle: Obstacle | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.obstacle = obstacle


class RequirementsRefused(WorkerError):
    """The job's requirements.txt cannot be installed on this node. The text contains pip's last lines."""


class SupervisorError(WorkerError):
    """Base class of errors about rank processes and about the shim."""


class ShimUnavailable(SupervisorError):
    """The node's shim cannot be started or reached."""

    retryable = True


class RanksNotGone(SupervisorError):
    """Rank processes of an older generation still run after the deadline. The node must not join a newer one."""


class UserRefused(WorkerError):
    """Ranks cannot run as the configured user. The text contains the reason."""


class StorageError(WorkerError):
    """A call to an object store failed. `obstacle` is None if the store did answer."""

    obstacle: ClassVar[Obstacle | None] = None


class StoreUnavailable(StorageError):
    """The store did not answer in time, throttled the call, or reported a server error."""

    retryable = True
    obstacle = Obstacle.NO_ANSWER


class ObjectMissing(StorageError):
    """The bucket or key does not exist."""


class BucketMissing(ObjectMissing):
    """The bucket does not exist, which says nothing about its objects."""

    obstacle = Obstacle.NO_BUCKET


class StoreDenied(StorageError):
    """The credentials do not allow this call."""

    obstacle = Obstacle.DENIED


class StoreRefused(StorageError):
    """The store rejected the request as invalid."""


class ForbiddenEndpoint(StorageError):
    """The endpoint is not on loopback, which local mode forbids."""


class ObjectChanged(StorageError):
    """The object no longer has the requested ETag."""

    retryable = True


class CorruptCheckpoint(StorageError):
    """A checkpoint object is truncated, altered, or not the object that the plan names."""

"""Errors of the agent.

    WorkerError
    ├── NoRoom                   memory for slots is used up (with the figures)
    ├── PeerError                a line to another agent failed
    │   ├── PeerLost             closed, timed out, or nobody answers: retryable
    │   └── PeerRefused          the other side does not know us, our key or our generation: retryable
    │       └── OtherGeneration  of the run that this node works for, but not what it is a member of now
    ├── AttestationFailed        the instance could not show who it is: retryable
    ├── SourceRefused            the user's source archive is not what the plan says, or not safe to unpack
    ├── InputRefused             an input channel of the job is not to be had on this node; `is_passing` says whether it may be later
    ├── LoadFailed               what a generation needs on this node is not to be had; carries a code and whether trying again may help
    ├── RequirementsRefused      what a job's requirements.txt asks for cannot be installed here
    ├── StubRefused              made-up GPUs outside of a local cluster
    ├── SupervisorError
    │   ├── ShimUnavailable      the node's shim cannot be started or reached
    │   └── RanksNotGone         processes of an older generation still live after the deadline
    ├── UserRefused              ranks cannot run as the user that was named
    └── StorageError             what an object store answered; `retryable` says whether the same call may be tried again
        ├── StoreUnavailable     no answer, a time-out, throttling or a 5xx: retryable
        ├── ObjectMissing        no such bucket or key
        ├── StoreDenied          the credentials do not allow it
        ├── StoreRefused         the request itself is wrong
        ├── ForbiddenEndpoint    local mode and an endpoint that is not loopback: nothing was sent
        ├── ObjectChanged        it is no longer the one that was listed: retryable, after another look
        └── CorruptCheckpoint    the object does not hold what the plan says

Retry policy is a property of the type, not of the place that catches it.
"""

from __future__ import annotations


class WorkerError(Exception):
    """Base of what the agent's parts raise."""

    retryable: bool = False


class AttestationFailed(WorkerError):
    """The instance could not show the control plane who it is."""

    retryable = True


class NoRoom(WorkerError):
    """The node's memory for slots does not suffice; `is_passing` where something else has taken it, which may give it back."""

    def __init__(self, *, needed_bytes: int, available_bytes: int, is_passing: bool = False) -> None:
        whose = " free on the node's tmpfs: something else takes them up" if is_passing else " there"
        super().__init__(f"slots need {needed_bytes:,} bytes of host memory and {available_bytes:,} bytes are{whose}")
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.is_passing = is_passing


class PeerError(WorkerError):
    """A line to another agent failed."""

    retryable = True


class PeerLost(PeerError):
    """Closed, timed out, or nobody answers."""


class PeerRefused(PeerError):
    """The other side does not know us, our key or our generation."""


class OtherGeneration(PeerRefused):
    """A session of the run that this node works for, but of a generation that it left or has not loaded yet; seen around every restart."""


class StubRefused(WorkerError):
    """Made-up GPUs were asked for outside of a local cluster."""


class SourceRefused(WorkerError):
    """The source archive is not what the plan says, or is not safe to unpack."""


class LoadFailed(WorkerError):
    """What a generation needs on this node is not to be had."""

    def __init__(self, code: str, message: str, *, is_permanent: bool) -> None:
        super().__init__(message)
        self.code = code
        self.is_permanent = is_permanent

    @classmethod
    def lacking(cls, parent: int, code: str, message: str, *, is_passing: bool) -> LoadFailed:
        """Return the error of a job that lacks something: at its first launch it is wrong; one that has trained may have it again on another node.

        Args:
            parent: of the generation.
            code: of the fault.
            message: a sentence for the user.
            is_passing: the same attempt may help.

        Returns:
            The error.
        """
        return cls(code, message, is_permanent=not is_passing and not parent)


class InputRefused(WorkerError):
    """An input channel of the job is not to be had on this node."""

    def __init__(self, message: str, *, is_passing: bool = False) -> None:
        super().__init__(message)
        self.is_passing = is_passing


class RequirementsRefused(WorkerError):
    """What a job's requirements.txt asks for cannot be installed here; with pip's last lines."""


class SupervisorError(WorkerError):
    """Something about the processes of this node."""


class ShimUnavailable(SupervisorError):
    """The node's shim cannot be started or reached."""

    retryable = True


class RanksNotGone(SupervisorError):
    """Processes of an older generation still live after the deadline; the node must not join a newer one."""


class UserRefused(WorkerError):
    """Ranks cannot run as the user that was named; says why."""


class StorageError(WorkerError):
    """A call to an object store failed."""


class StoreUnavailable(StorageError):
    """No answer, a time-out, throttling or a server's error."""

    retryable = True


class ObjectMissing(StorageError):
    """There is no such bucket or key."""


class StoreDenied(StorageError):
    """The credentials do not allow this call."""


class StoreRefused(StorageError):
    """The store says that the request itself is wrong."""


class ForbiddenEndpoint(StorageError):
    """Local mode talks to loopback addresses only."""


class ObjectChanged(StorageError):
    """An object is no longer the one that was asked for by its ETag."""

    retryable = True


class CorruptCheckpoint(StorageError):
    """An object of a checkpoint is truncated, altered, or not the one that the plan names."""

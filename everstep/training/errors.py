"""Errors of the training hooks.

    TrainingError
    ├── CannotResume        a registered object has state that cannot be restored; the error names the object
    ├── RestoreMismatch     the snapshot does not fit what the script built, or the ranks disagree about the step
    │   └── CannotRelayout  a different layout's snapshot cannot be loaded here; the error names the tensor or object
    ├── AgentUnreachable    the rank had no connection to its agent for too long, at its start or during the restore
    ├── StaleGeneration     the agent runs a different generation than this rank
    ├── UnsupportedVersion  Everstep has no tests with the installed major version of another package
    └── SessionMisuse       the script made a call in the wrong order or with a wrong value

Only `AgentUnreachable` is worth a retry. For the other errors, a retry fails in the same way.
"""

from __future__ import annotations

from typing import ClassVar


class TrainingError(Exception):
    """Base class of all errors that the training hooks raise."""

    code: ClassVar[str] = "training_error"
    """Error code that the rank reports to its agent before it raises the error."""
    retryable: ClassVar[bool] = False


class CannotResume(TrainingError):
    """A registered object has state that cannot be restored.

    `init` rejects such objects before the first step. A change during training may cause the error later.

    Args:
        name: path under which the script registered the object, for example `extra/ema/callback`.
        reason: which part of the state cannot be restored, and what to do instead.
    """

    code = "cannot_resume"

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


class RestoreMismatch(TrainingError):
    """The snapshot does not fit the model, optimizer, versions or world size of this launch.

    When a session raises this error, it has not changed the model or any other object. `TrainingSession.restore`
    describes the only exception.
    """

    code = "restore_mismatch"


class CannotRelayout(RestoreMismatch):
    """A snapshot of an earlier launch with a different layout cannot be loaded into this launch.

    Args:
        name: the tensor, the loader or the object that cannot be mapped, for example `model/head.weight`.
        reason: both layouts, and what to do instead.
    """

    code = "cannot_relayout"

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


class AgentUnreachable(TrainingError):
    """The rank had no connection to its agent for longer than the timeout, at its start or during the restore."""

    code = "agent_unreachable"
    retryable = True


class StaleGeneration(TrainingError):
    """The agent runs a different generation, because this rank belongs to an earlier launch."""

    code = "stale_generation"


class SessionMisuse(TrainingError):
    """The script made a call in the wrong order, or passed a wrong value."""

    code = "session_misuse"


class UnsupportedVersion(TrainingError):
    """Everstep has no tests with the installed major version of another package.

    Args:
        package: name of the package on the registry, as in `pip install`.
        installed: version of the installed package, for example `6.0.1`.
        tested: the newest tested version, for example `5.24`.
    """

    code = "unsupported_version"

    def __init__(self, package: str, installed: str, tested: str) -> None:
        super().__init__(
            f"{package} {installed} is installed, and Everstep is tested with {package} {tested}. "
            f"Install it: pip install '{package}=={tested}.*'"
        )

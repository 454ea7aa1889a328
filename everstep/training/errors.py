"""Errors of the training hooks.

    TrainingError
    ├── CannotResume        the script registered something whose state cannot be brought back; named
    ├── RestoreMismatch     the snapshot to restore does not fit what the script built, or the ranks disagree
    ├── AgentUnreachable    no answer on the agent's socket when the session began
    ├── StaleGeneration     the agent runs another generation than this rank
    └── SessionMisuse       a call out of order: a fault of the script

Only `AgentUnreachable` is worth another attempt; the others come back the same.
"""

from __future__ import annotations

from typing import ClassVar


class TrainingError(Exception):
    """Anything that keeps a session from going on."""

    code: ClassVar[str] = "training_error"
    """What the agent is told before this is raised."""
    retryable: ClassVar[bool] = False


class CannotResume(TrainingError):
    """The state of something registered cannot be brought back, so it is refused before the first step.

    Args:
        name: where it was registered, as a path: `extra/ema/callback`.
        reason: what about it cannot be resumed, and what to do instead.
    """

    code = "cannot_resume"

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


class RestoreMismatch(TrainingError):
    """The snapshot does not fit the model, optimizer, versions or world that the script built. Nothing was written."""

    code = "restore_mismatch"


class AgentUnreachable(TrainingError):
    """The agent's socket gave no answer in time."""

    code = "agent_unreachable"
    retryable = True


class StaleGeneration(TrainingError):
    """The agent runs another generation: this rank is a leftover."""

    code = "stale_generation"


class SessionMisuse(TrainingError):
    """A call out of order."""

    code = "session_misuse"

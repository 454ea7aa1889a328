"""Errors of the integrations.

    TrainingError (everstep.training.errors)
    ├── UnsupportedVersion   Everstep has no tests with the installed major version (class of everstep.training.errors)
    └── UnsupportedOption    an option of the framework prevents an exact resume; the error names an alternative

The integrations check versions and options before the first step. If an option changes later, they may raise
`UnsupportedOption` later. A retry fails in the same way.
"""

from __future__ import annotations

from everstep.training.errors import TrainingError, UnsupportedVersion

__all__ = ["UnsupportedOption", "UnsupportedVersion"]


class UnsupportedOption(TrainingError):
    """An option or a value prevents an exact resume.

    Args:
        option: name of the option, as the user wrote it.
        reason: why it prevents a resume.
        alternative: what to do instead, as a sentence.
    """

    code = "unsupported_option"

    def __init__(self, option: str, reason: str, alternative: str) -> None:
        super().__init__(f"{option}: {reason}. {alternative}")
        self.option = option

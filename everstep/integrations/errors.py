"""Errors of the integrations.

    TrainingError (everstep.training.errors)
    ├── UnsupportedVersion   Everstep has no tests with the installed major version of the framework
    └── UnsupportedOption    an option of the framework prevents an exact resume; the error names an alternative

The integrations raise both errors before the first step. A retry fails in the same way.
"""

from __future__ import annotations

from everstep.training.errors import TrainingError


class UnsupportedVersion(TrainingError):
    """Everstep has no tests with the installed major version of a framework.

    Args:
        package: name of the framework's package.
        installed: version of the installed package, for example `6.0.1`.
        tested: the newest tested version, for example `5.24`.
    """

    code = "unsupported_version"

    def __init__(self, package: str, installed: str, tested: str) -> None:
        super().__init__(
            f"{package} {installed} is installed, and Everstep is tested with {package} {tested}. "
            f"Install it: pip install '{package}=={tested}.*'"
        )


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

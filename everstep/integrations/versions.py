"""The versions of the frameworks with which the integrations are tested."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import Final

from everstep.integrations.errors import UnsupportedVersion

TESTED: Final = {"transformers": "5.24", "accelerate": "1.15"}
"""Major and minor version of each framework in the tests, by package name."""

logger = logging.getLogger("everstep.integrations")


def check_version(package: str) -> None:
    """Check the installed version of a framework. A minor version without tests causes a warning.

    Args:
        package: name of the package, a key of `TESTED`.

    Raises:
        UnsupportedVersion: the installed major version is not the tested one.
    """
    installed, tested = importlib.metadata.version(package), TESTED[package]
    if installed.split(".")[0] != tested.split(".")[0]:
        raise UnsupportedVersion(package, installed, tested)
    if installed.split(".")[:2] != tested.split("."):
        logger.warning("%s %s is installed; the tests of Everstep use %s", package, installed, tested)

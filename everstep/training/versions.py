"""Lists the versions of other packages with which Everstep is tested, and checks the installed versions."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import Final

from everstep.training.errors import UnsupportedVersion

TESTED: Final = {
    "transformers": "5.24",
    "accelerate": "1.15",
    "trl": "1.16",
    "lightning": "2.6",
    "torchtitan": "0.3",
    "peft": "0.21",
    "deepspeed": "0.19",
    "datasets": "4.7",
    "torchdata": "0.11",
}
"""Major and minor version with which Everstep's tests run."""

logger = logging.getLogger("everstep.training")


def check_version(package: str) -> None:
    """Warn about an untested version of a package of `TESTED` that should be compatible. Raises UnsupportedVersion if
    the major version differs, or the minor version below version 1.
    """
    installed, tested = importlib.metadata.version(package), TESTED[package]
    found, wanted = installed.split(".")[:2], tested.split(".")
    if found[0] != wanted[0] or (wanted[0] == "0" and found != wanted):
        raise UnsupportedVersion(package, installed, tested)
    if found != wanted:
        logger.warning("%s %s is installed; the tests of Everstep use %s", package, installed, tested)

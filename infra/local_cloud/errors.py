"""Defines the errors of the local cloud.

    LocalCloudError
    ├── PreflightFailed      this machine cannot run a local cloud, or one is already up; nothing was started
    ├── StartFailed          a part did not start in time, or died; the message names its log
    ├── NotUp                no local cloud is up in this state directory
    ├── LocalEndpointRefused the address is not on this machine
    └── FaultRefused         the fault is impossible here or for this target; nothing was done

The command line prints only the message of such an error, without a traceback.
"""

from __future__ import annotations


class LocalCloudError(Exception):
    """Base class of the errors that the local cloud raises."""


class PreflightFailed(LocalCloudError):
    """This machine cannot run the local cloud, or a local cloud is already up."""


class StartFailed(LocalCloudError):
    """A part (a long-lived process) of the local cloud did not start."""


class NotUp(LocalCloudError):
    """No local cloud is recorded in the state directory."""


class LocalEndpointRefused(LocalCloudError):
    """The endpoint is not on this machine. Clients of the local cloud connect to this machine only."""


class FaultRefused(LocalCloudError):
    """The fault is impossible in this local cloud or for this target."""

"""Errors of the local cloud.

    LocalCloudError
    ├── PreflightFailed      this machine cannot run it, or one runs already; nothing was started
    ├── StartFailed          a part did not come up in time, or died; names its log
    ├── NotUp                there is no local cloud in this state directory
    ├── EndpointRefused      an address that is not on this machine
    └── FaultRefused         this fault cannot really happen here, or not to this target; nothing was done

All are operating errors: the command line prints the message alone.
"""

from __future__ import annotations


class LocalCloudError(Exception):
    """Base of what the local cloud raises."""


class PreflightFailed(LocalCloudError):
    """This machine cannot run the local cloud, or one runs already."""


class StartFailed(LocalCloudError):
    """A part of the local cloud did not come up."""


class NotUp(LocalCloudError):
    """No local cloud is recorded in the state directory."""


class EndpointRefused(LocalCloudError):
    """The local cloud's clients talk to this machine only."""


class FaultRefused(LocalCloudError):
    """A fault cannot happen here, or not to this target."""

"""Errors of the local cloud. The command line prints only their messages, without a traceback."""

from __future__ import annotations


class LocalCloudError(Exception):
    """Base class of the errors that the local cloud raises."""


class PreflightFailed(LocalCloudError):
    """This machine cannot run the local cloud, or one is already up. Nothing was started."""


class StartFailed(LocalCloudError):
    """A part of the local cloud did not start in time, or died. The message names its log."""


class NotUp(LocalCloudError):
    """No local cloud is recorded in the state directory."""


class LocalEndpointRefused(LocalCloudError):
    """The endpoint is not on this machine. Clients of the local cloud connect to this machine only."""


class FaultRefused(LocalCloudError):
    """The fault is impossible here or for this target. Nothing was done."""

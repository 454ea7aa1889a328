"""Errors of reading and exporting checkpoints. Each message names the object and the remedy."""

from __future__ import annotations

from everstep.errors import EverstepError


class CheckpointError(EverstepError):
    """A checkpoint cannot be read or exported."""


class CorruptCheckpoint(CheckpointError):
    """The stored bytes differ from the bytes that the training job uploaded.

    The user should use another checkpoint of the job.
    """


class IncompleteTensor(CheckpointError):
    """The shards together do not contain a whole parameter or optimizer state, or disagree about its dtype or shape."""


class StoreFailure(CheckpointError):
    """A file or an S3 object cannot be read or written."""

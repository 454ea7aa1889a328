"""Errors of reading and exporting checkpoints. Each message names the object and the remedy."""

from __future__ import annotations

from everstep.errors import EverstepError


class CheckpointError(EverstepError):
    """A checkpoint cannot be read or exported."""


class CorruptCheckpoint(CheckpointError):
    """The stored bytes differ from the bytes that the training job uploaded. Use another checkpoint of the job."""


class IncompleteTensor(CheckpointError):
    """The shards contain only a part of a logical tensor, or disagree about its dtype, shape or boxes."""


class StoreFailure(CheckpointError):
    """A file or an S3 object cannot be read or written."""

"""Errors of reading and exporting checkpoints. Each message names the object and what to do."""

from __future__ import annotations

from everstep.errors import EverstepError


class CheckpointError(EverstepError):
    """A checkpoint cannot be read or exported."""


class CorruptCheckpoint(CheckpointError):
    """The stored bytes are not what the training job uploaded. Use another checkpoint of the job."""


class IncompleteTensor(CheckpointError):
    """The shards hold only a part of a logical tensor, or contradict each other about it."""


class StoreFailure(CheckpointError):
    """A file or an S3 object cannot be read or written."""

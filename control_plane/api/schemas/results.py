"""API models: output files of a job."""

from __future__ import annotations

from control_plane.api.schemas.common import Shape
from everstep.protocol.agent_messages import OutputCause


class OutputEntry(Shape):
    """One file that a rank wrote into its output directory."""

    generation: int
    path: str
    """Path within the generation: `rank=0/model.safetensors`."""
    key: str
    bytes: int


class UnstoredOutput(Shape):
    """A file, link or other entry of a rank's output directory that is not in S3."""

    path: str
    """Path below the job's outputs: `gen=1/rank=0/latest`. Bytes that are not UTF-8 are escaped."""
    cause: OutputCause


class ListOutputsResponse(Shape):
    """A page of a job's output files."""

    outputs: list[OutputEntry]
    next_token: str | None = None

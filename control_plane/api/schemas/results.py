"""API models: output files of a job."""

from __future__ import annotations

from control_plane.api.schemas.common import Shape


class OutputEntry(Shape):
    """One file that a rank wrote into its output directory."""

    generation: int
    path: str
    """Path within the generation: `rank=0/model.safetensors`."""
    key: str
    bytes: int


class ListOutputsResponse(Shape):
    """A page of a job's output files."""

    outputs: list[OutputEntry]
    next_token: str | None = None

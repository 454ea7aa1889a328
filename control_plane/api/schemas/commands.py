"""Shapes of the API: commands that users run beside a rank."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from control_plane.api.schemas.common import Request, Shape


class ExecuteCommandRequest(Request):
    """A program to be run beside a rank."""

    command: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]], Field(min_length=1, max_length=64)
    ]
    """The program and its arguments, as they are: no shell sees them. `{pid}` in one is the rank's process."""
    timeout_in_seconds: int = Field(default=30, ge=1, le=50)
    """It is ended after this long."""
    stdin: Annotated[
        str | None, StringConstraints(max_length=65_536), Field(json_schema_extra={"x-sensitive": True})
    ] = None
    """What the program reads from its stdin, in UTF-8; nothing unless given.

    How long it was is told in the history, and no more.
    """
    client_request_token: Annotated[
        str | None,
        StringConstraints(min_length=1, max_length=64),
        Field(json_schema_extra={"x-idempotency-token": True}),
    ] = None
    """The same command asked for again with the same token is not run again: it is answered again."""


class ExecuteCommandResponse(Shape):
    """What a program beside a rank has said, and how it ended."""

    training_job_name: str
    rank: int
    generation: int
    node_id: str
    exit_code: int | None
    """As a shell says it; absent where it did not end in time."""
    stdout: str
    stderr: str
    """The first 256 KiB of each."""
    is_output_cut: bool
    """There was more."""
    is_timed_out: bool

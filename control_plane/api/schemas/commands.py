"""API models: commands that users run on the node of a rank, for example to inspect the rank."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from control_plane.api.schemas.common import Request, Shape


class ExecuteCommandRequest(Request):
    """A program to run on the node of a rank, as the Linux user of the job's ranks."""

    command: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=4096)]], Field(min_length=1, max_length=64)
    ]
    """The program and its arguments, passed on without a shell.

    `{pid}` is replaced by the process id of the rank.
    """
    timeout_in_seconds: int = Field(default=30, ge=1, le=50)
    """Time limit of the program. The agent ends the program at the limit."""
    stdin: Annotated[
        str | None, StringConstraints(max_length=65_536), Field(json_schema_extra={"x-sensitive": True})
    ] = None
    """Text that the program reads from stdin, in UTF-8. The default is empty.

    The event history records the length of the text, not the text.
    """
    client_request_token: Annotated[
        str | None,
        StringConstraints(min_length=1, max_length=64),
        Field(json_schema_extra={"x-idempotency-token": True}),
    ] = None
    """Identifies the request.

    A repeated request with the same token does not run the command again; it returns the same response.
    """


class ExecuteCommandResponse(Shape):
    """Output and exit code of a program that ran on the node of a rank."""

    training_job_name: str
    rank: int
    generation: int
    node_id: str
    exit_code: int | None
    """The exit code as a shell reports it. Absent if the program did not end within TimeoutInSeconds."""
    stdout: str
    stderr: str
    """Standard error of the program. Stdout and Stderr contain at most the first 256 KiB of each stream."""
    is_output_cut: bool
    """Whether Stdout or Stderr was truncated."""
    is_timed_out: bool

"""ExecuteCommand: runs a user's program on the node of a rank, through the node's agent.

The program can inspect the rank, for example with `py-spy`. The fleet must set AllowCommands.

Invariant: an event with the caller, the command and the rank is stored before the agent receives the command.
"""

from __future__ import annotations

import hashlib
import secrets
import shlex
from typing import Annotated, Final

from fastapi import Path

from control_plane.api.auth import Caller, User
from control_plane.api.deps import Services, ServicesDep, TrainingJobNamePath
from control_plane.api.errors import Forbidden, InUse, Throttled, Unavailable, invalid
from control_plane.api.router import Router
from control_plane.api.routes.jobs import find_job
from control_plane.api.schemas import commands as commands_schemas
from control_plane.core.states import LAUNCHED_JOBS, JobState
from control_plane.db import events, fleets, jobs
from control_plane.loop.command_desk import AnotherCommand, NotAnswered, NotAsked, TooManyCommands
from everstep.protocol.agent_messages import RunCommand
from everstep.protocol.ids import Generation, NodeId, Rank, RunId

router = Router(prefix="/v1/training-jobs/{TrainingJobName}/ranks/{Rank}/commands", tags=["TrainingJobs"])

RankPath = Annotated[int, Path(alias="Rank", ge=0, le=2**31 - 1)]
MAX_EVENT_COMMAND_LENGTH: Final = 500
"""Maximum number of characters of a command in the event that records it."""


@router.post("", operation_id="ExecuteCommand")
async def execute_command(
    training_job_name: TrainingJobNamePath,
    rank: RankPath,
    request: commands_schemas.ExecuteCommandRequest,
    caller: User,
    services: ServicesDep,
) -> commands_schemas.ExecuteCommandResponse:
    """Run a program on the node of a rank and return its output, for example `py-spy dump --pid {pid}`.

    Requires a fleet with AllowCommands. The program runs as the Linux user of the job's ranks: a uid of the job's own,
    by default from 61101 to 61163. If the agent is not root or has `--rank-user root`, that is the agent's user. The
    program runs in the rank's cgroup, with RANK and EVERSTEP_RANK_PID in its environment. It has neither a shell nor a
    terminal. An event records the caller and the command.

    Raises ConflictException if the ClientRequestToken belongs to another command or the agent did not run the program.
    Raises ThrottlingException if too many commands run. Raises ServiceUnavailableException if the agent is not
    connected or does not answer in time; in the second case, the program may have run.
    """
    desk = services.registry.commands
    job_name, node_id, command = await services.caller_threads.run(
        _ask, services, training_job_name, rank, request, caller
    )
    try:
        ended = await desk.run(node_id, command)
    except TooManyCommands:
        raise Throttled("This server already runs its maximum number of commands.", hint="Retry in a moment.") from None
    except NotAsked:
        raise Unavailable(
            f"The agent of {node_id} is not connected to this server; the command was not run.",
            hint="Retry in a moment.",
        ) from None
    except NotAnswered:
        raise Unavailable(f"{node_id} has not responded; it may have run the command.") from None
    except AnotherCommand:
        raise InUse("The ClientRequestToken was used for another command.") from None
    if ended.refusal:
        raise InUse(f"The command has no result: {ended.refusal}.")
    return commands_schemas.ExecuteCommandResponse(
        training_job_name=job_name,
        rank=rank,
        generation=command.generation,
        node_id=node_id,
        exit_code=ended.exit_code,
        stdout=ended.stdout.decode(errors="replace"),
        stderr=ended.stderr.decode(errors="replace"),
        is_output_cut=ended.is_cut,
        is_timed_out=ended.is_timed_out,
    )


def _ask(
    services: Services, name: str, rank: int, request: commands_schemas.ExecuteCommandRequest, caller: Caller
) -> tuple[str, NodeId, RunCommand]:
    """Record an ExecuteCommand call as an event.

    Return the job's name, the rank's node, and the message to send to the node's agent. Blocks on the database.
    """
    if any("\0" in word for word in request.command):
        raise invalid("Command", "an argument must not contain a NUL character", "{field}: {message}.")
    with services.database.write() as session:
        job = find_job(session, name, caller)
        if not fleets.get(session, job.fleet_name).allow_commands:
            hint = f"everstep fleets update {job.fleet_name} --allow-commands"
            raise Forbidden(f"The fleet {job.fleet_name!r} does not allow commands.", hint=hint)
        if JobState(job.state) not in LAUNCHED_JOBS:
            raise InUse(f"The training job {job.name!r} is {job.state}: it has no ranks now.")
        plan = jobs.generation(session, job.run_id, job.generation).plan
        node = next((node for node in plan.nodes if rank in node.ranks), None)
        if node is None:
            raise invalid("Rank", f"is not one of the {plan.world_size} ranks of {job.name}", "{field} {message}.")
        token = f"{job.run_id}:{caller.token.id}:{request.client_request_token or secrets.token_hex(16)}"
        command = RunCommand(
            run=RunId(job.run_id),
            generation=Generation(job.generation),
            command_id=hashlib.sha256(token.encode()).hexdigest(),
            rank=Rank(rank),
            argv=tuple(request.command),
            timeout_seconds=float(request.timeout_in_seconds),
            stdin=(request.stdin or "").encode(),
        )
        if not services.registry.commands.is_known(command.command_id):
            command_line = shlex.join(request.command)
            command_line = (
                command_line
                if len(command_line) <= MAX_EVENT_COMMAND_LENGTH
                else f"{command_line[:MAX_EVENT_COMMAND_LENGTH]}…"
            )
            given = f" (given {len(command.stdin)} bytes)" if command.stdin else ""
            message = (
                f"{caller.name} ran a command on the node of rank {rank} of {job.name}, generation {job.generation}: "
                f"{command_line}{given}"
            )
            events.append_for_job(session, job, "CommandExecuted", message, services.now(), node_id=node.node_id)
    return job.name, NodeId(node.node_id), command

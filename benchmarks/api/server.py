"""The server that the API benchmark measures, and a FastAPI route that returns a constant, for comparison.

    python -P -m benchmarks.api.server DIRECTORY JOBS NODES

Everstep's application has a filled database and the tests' fake cloud, but no loops. The process writes one line of
JSON when both servers listen, and ends when its stdin is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from control_plane.__main__ import listening
from control_plane.app import Server, create_app, server_config
from control_plane.cloud.connection import CloudMode
from control_plane.core.states import JobState
from control_plane.db import fleets, jobs, schema, tokens
from control_plane.db.jobs import NewJob, SavedJobSpec
from control_plane.db.session import Database
from control_plane.db.tokens import NewToken, Role, TokenKind
from control_plane.gate import Gate
from control_plane.settings import Settings
from tests.fakes.cloud import FakeOperator, MemoryObjectStore

BUCKET = "everstep"
FLEET = "main"


class SlowStore(MemoryObjectStore):
    """An object store whose listings take half a second."""

    def list(self, *arguments: Any, **options: Any) -> Any:
        threading.Event().wait(0.5)
        return super().list(*arguments, **options)


def main() -> None:
    # Log no warnings, because the load generator ends each connection with an invalid message.
    logging.getLogger("control_plane").setLevel(logging.ERROR)
    directory, job_count, node_count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    settings = Settings(
        state_directory=directory, bucket=BUCKET, mode=CloudMode.LOCAL, aws_endpoint_url="http://127.0.0.1:1"
    )
    directory.mkdir(parents=True)
    database = Database(settings.database)
    schema.migrate(database)
    sessions = fill(database, job_count, node_count)
    bare = FastAPI()

    @bare.get("/bare")
    async def answer() -> dict[str, str]:
        return {"TrainingJobName": "job-0"}

    app = create_app(settings, operator=FakeOperator(), objects=SlowStore(BUCKET), loops=lambda *_: ())
    listeners = [listening("127.0.0.1", 0) for _ in range(2)]
    gates = Gate(), Gate()
    servers = [
        Server(server_config(app, gates[0], lifespan="on"), gates[0]),
        uvicorn.Server(server_config(bare, gates[1], lifespan="off")),
    ]
    ports = [listener.getsockname()[1] for listener in listeners]

    def end() -> None:
        sys.stdin.read()
        for server in servers:
            server.should_exit = True

    async def serve() -> None:
        threading.Thread(target=end, daemon=True).start()
        await asyncio.gather(
            *(server.serve(sockets=[listener]) for server, listener in zip(servers, listeners, strict=True))
        )

    admin = (directory / "admin_token").read_text().strip()
    with database.write() as session:
        callers = {
            project: tokens.mint(
                session, NewToken(kind=TokenKind.USER, role=Role.SUBMITTER, project=project), datetime.now(UTC)
            )[0]
            for project in ("project-1", "project-2")
        }
    # The sockets already listen, so early requests wait until the servers run.
    print(
        json.dumps({"port": ports[0], "bare_port": ports[1], "token": admin, "callers": callers, "sessions": sessions}),
        flush=True,
    )
    asyncio.run(serve())
    database.close()


def fill(database: Database, job_count: int, node_count: int) -> dict[str, str]:
    """Fill the database with a fleet, jobs and agents' session tokens; return the tokens by node."""
    now = datetime.now(UTC)
    with database.write() as session:
        fleets.create(
            session,
            fleets.NewFleet(
                name=FLEET,
                auto_scaling_group_name="group",
                project="",
                state="active",
                min_node_count=0,
                spare_count=0,
                max_node_count=64,
                instance_type="p5.48xlarge",
                availability_zone="us-east-1a",
                tags={},
            ),
            now,
        )
        for number, job in enumerate(many(job_count)):
            jobs.create(session, job, now - timedelta(seconds=job_count - number))
        return {
            node: tokens.mint(
                session,
                NewToken(kind=TokenKind.SESSION, role=Role.AGENT, project="", fleet_name=FLEET, node_id=node),
                now,
            )[0]
            for node in (f"i-{number:017x}" for number in range(node_count))
        }


def many(count: int) -> Iterator[NewJob]:
    """Yield jobs with typical settings. The first has completed, all others run."""
    for number in range(count):
        run_id = uuid.uuid4().hex
        spec = SavedJobSpec(
            source_sha256=f"{number % 50:064x}",
            source_bucket=BUCKET,
            source_key=f"sources/{number % 50}.tar.gz",
            source_bytes=10_000,
            entry_point="train.py",
            node_count=8,
            ranks_per_node=8,
            copies=2,
            checkpoint_uri=f"s3://{BUCKET}/jobs/job-{number}/checkpoints/",
            output_uri=f"s3://{BUCKET}/jobs/job-{number}/run={run_id}/output/",
            log_uri=f"s3://{BUCKET}/jobs/job-{number}/logs/",
            hyperparameters={
                "learning_rate": "3e-4",
                "sequence_length": "4096",
                "batch_size": "64",
                "warm_up_steps": "2000",
            },
            environment={"NCCL_DEBUG": "WARN", "TOKENIZERS_PARALLELISM": "false"},
        )
        yield NewJob(
            run_id=run_id,
            name=f"job-{number}",
            fleet_name=FLEET,
            project=f"project-{number % 5}",
            priority=0,
            tags={"team": f"team-{number % 7}", "model": "gpt"},
            spec=spec,
            state=JobState.RUNNING if number else JobState.COMPLETED,
            reason="All ranks train; every step is kept on two nodes.",
        )


if __name__ == "__main__":
    main()

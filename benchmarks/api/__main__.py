"""Command of the API benchmark: `make bench-api`. `benchmarks.command` documents options and exit codes."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.api import hostile
from benchmarks.api.load import answer_seconds, for_seconds, heartbeats, request
from benchmarks.api.report import PAGE
from benchmarks.cluster_jobs import SCRIPTS, started_bench
from benchmarks.command import Begun
from benchmarks.errors import BenchmarkFailed
from benchmarks.machine import ROOT
from control_plane.db import events
from control_plane.db.session import Database
from infra.local_cloud.up import ClusterOptions

PARTS = ("requests", "heartbeats", "hostile", "logs", "commands")
JOBS = 10_000
AGENTS = 50
WRITES_PER_SECOND = 10.0
ORDERS = (
    ("CreationTime", "Descending"),
    ("CreationTime", "Ascending"),
    ("Name", "Ascending"),
    ("LastModifiedTime", "Descending"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The API server that the benchmark measures, as a running process."""

    pid: int
    port: int
    bare_port: int
    token: str
    callers: dict[str, str]
    sessions: dict[str, str]
    database: str

    def target(self, jobs: int) -> hostile.Target:
        node, session = next(iter(self.sessions.items()))
        return hostile.Target(
            pid=self.pid,
            port=self.port,
            good_token=self.callers["project-1"],
            good_jobs=tuple(f"job-{number}" for number in range(1, jobs, 5)),
            hostile_token=self.callers["project-2"],
            hostile_jobs=tuple(f"job-{number}" for number in range(2, jobs, 5)),
            node=node,
            session=session,
        )

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(directory: Path, jobs: int) -> Iterator[Service]:
    """Run the API server of `benchmarks.api.server` while the `with` block runs."""
    command = [sys.executable, "-P", "-m", "benchmarks.api.server", str(directory), str(jobs), str(AGENTS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            if not said:
                raise BenchmarkFailed(f"the server did not start: exit code {process.wait()}")
            yield Service(pid=process.pid, database=f"sqlite:///{directory / 'everstep.db'}", **json.loads(said))
        finally:
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def writing(url: str) -> Iterator[None]:
    """Commit to the database a few times per second in the `with` block, as a busy server's background loops do."""
    stop, database = threading.Event(), Database(url)

    def write() -> None:
        while not stop.wait(1 / WRITES_PER_SECOND):
            with database.write() as session:
                events.append(
                    session, events.NewEvent(at=datetime.now(UTC), type="Written", message="by the benchmark")
                )

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        database.close()


def measure_requests(service: Service, *, seconds: float, pages: int) -> dict[str, Any]:
    """Measure the responses per second of three API routes, and the response time of each page of the job list."""

    def rate(port: int, what: Iterator[bytes]) -> float:
        taken, lasted = answer_seconds(port, what)
        return len(taken) / lasted

    bare, one = request(service.bare_port, "/bare"), request(service.port, "/v1/training-jobs/job-1", service.token)
    # Send some requests that are not measured, because a server answers its first requests more slowly.
    rate(service.bare_port, for_seconds(bare, 0.5))
    rate(service.port, for_seconds(one, 0.5))
    bare_rates, describe_rates, new_rates = [], [], []
    with writing(service.database):
        for turn in range(2):
            bare_rates.append(rate(service.bare_port, for_seconds(bare, seconds)))
            describe_rates += [rate(service.port, for_seconds(one, seconds)) for _ in range(2)]
            fresh = (
                request(service.port, f"/v1/training-jobs/job-{n}", service.token)
                for n in range(2 + turn * 400, 402 + turn * 400)
            )
            new_rates.append(rate(service.port, fresh))
        bare_rates.append(rate(service.bare_port, for_seconds(bare, seconds)))
        listed = [each for order in ORDERS for each in list_seconds(service, order, pages)]
    return {
        "bare_rates": bare_rates,
        "describe_rates": describe_rates,
        "describe_new_rates": new_rates,
        "writes_per_second": WRITES_PER_SECOND,
        "list_seconds": listed,
    }


def list_seconds(service: Service, order: tuple[str, str], pages: int) -> list[float]:
    """Read the job list page by page; return the response time of each page."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port)
    found, token = [], ""
    for _ in range(pages):
        path = f"/v1/training-jobs?SortBy={order[0]}&SortOrder={order[1]}" + (f"&NextToken={token}" if token else "")
        begun = time.perf_counter()
        connection.request("GET", path, headers={"authorization": f"Bearer {service.token}"})
        body = connection.getresponse().read()
        found.append(time.perf_counter() - begun)
        token = json.loads(body).get("NextToken", "")
        if not token:
            break
    connection.close()
    return found


def measure_heartbeats(service: Service, *, rounds: int, each: int) -> dict[str, Any]:
    """Measure the agent reports per second that the server processes."""
    rates, length = [], 0
    for _ in range(rounds):
        before = service.cpu_seconds()
        heard = heartbeats(service.port, service.sessions, each)
        rates.append(heard.reports / max(heard.wall_seconds, service.cpu_seconds() - before))
        length = heard.bytes_per_report
    return {"heartbeat_rates": rates, "heartbeat_bytes": length, "agent_count": len(service.sessions)}


def measure_logs(begun: Begun, *, seconds: float) -> dict[str, Any]:
    """Follow a job's log. Return the seconds from each line's output until the client received the line."""
    with started_bench(begun.home, begun.say, ClusterOptions(nodes=1, spares=0)) as bench:
        bench.wait_until_warm(1)
        source = begun.home / "talking"
        source.mkdir()
        shutil.copy(SCRIPTS / "talking.py", source)
        name = "talking"
        bench.submit(
            name,
            source,
            "talking.py",
            nodes=1,
            copies=1,
            hyperparameters={"seconds": seconds, "lines_per_second": 10},
        )
        late: list[float] = []
        with closing(bench.client.follow_logs(TrainingJobName=name)["EventStream"]) as stream:
            for said in stream:
                now = time.time()
                printed = (re.fullmatch(r"at (\d+\.\d+)", event["Message"]) for event in said["LogEvents"]["Events"])
                at = [float(match[1]) for match in printed if match]
                late += [now - when for when in at]
    return {"follow_seconds": late}


def measure_commands(service: Service, *, count: int) -> dict[str, list[float]]:
    """Run commands of the CLI `everstep` repeatedly. Return the duration in seconds of each run, by command."""
    environment = {
        **os.environ,
        "EVERSTEP_ENDPOINT_URL": f"http://127.0.0.1:{service.port}",
        "EVERSTEP_TOKEN": service.token,
    }
    found: dict[str, list[float]] = {"everstep --help": [], "everstep jobs list": []}
    for _ in range(count + 1):
        for words, seconds in found.items():
            begun = time.perf_counter()
            done = subprocess.run(
                [str(Path(sys.executable).parent / "everstep"), *words.split()[1:]],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            seconds.append(time.perf_counter() - begun)
            if done.returncode:
                raise BenchmarkFailed(f"{words} ended with {done.returncode}: {done.stderr}")
    # Drop the first run of each command, because it reads its files from the disk and not from the page cache.
    return {words: seconds[1:] for words, seconds in found.items()}


def measure(begun: Begun) -> dict[str, Any]:
    """Measure the parts that `--only` names."""
    is_quick, parts = begun.is_quick, begun.parts
    found: dict[str, Any] = {"job_count": 1_000 if is_quick else JOBS}
    with serving(begun.home / "server", found["job_count"]) as service:
        begun.say(f"started a server with {found['job_count']:,} jobs")
        if "requests" in parts:
            found |= measure_requests(service, seconds=1.0 if is_quick else 4.0, pages=found["job_count"] // 100)
            begun.say("measured requests")
        if "heartbeats" in parts:
            found |= measure_heartbeats(service, rounds=2 if is_quick else 5, each=200 if is_quick else 1_000)
            begun.say("measured reports of agents")
        if "hostile" in parts:
            found |= hostile.measure(service.target(found["job_count"]), seconds=2 if is_quick else 10, say=begun.say)
        if "commands" in parts:
            found["command_seconds"] = measure_commands(service, count=3 if is_quick else 11)
            begun.say("measured commands")
    if "logs" in parts:
        found |= measure_logs(begun, seconds=8 if is_quick else 40)
        begun.say("measured followed logs")
    return found


if __name__ == "__main__":
    sys.exit(command.run(PAGE, measure, parts=PARTS))

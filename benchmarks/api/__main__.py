"""Command of the API benchmark: `make bench-api`.

    python -m benchmarks.api [--quick] [--only requests heartbeats logs commands …]

Exit code 2: a value missed its limit. Exit code 3: the machine was busy, so that no value counts.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.api import report
from benchmarks.api.load import answer_seconds, for_seconds, heartbeats, request
from benchmarks.begin import begin
from benchmarks.cluster_jobs import ROOT, SCRIPTS, Bench
from benchmarks.errors import BenchmarkFailed
from control_plane.db import events
from control_plane.db.session import Database
from everstep import failures
from everstep.errors import EverstepError
from infra.local_cloud.errors import LocalCloudError
from infra.local_cloud.up import ClusterOptions, LocalCluster

HOME = ROOT / ".everstep" / "bench" / "api"
PARTS = ("requests", "heartbeats", "logs", "commands")
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
    """A running API server."""

    pid: int
    port: int
    bare_port: int
    token: str
    sessions: dict[str, str]
    database: str

    def cpu_seconds(self) -> float:
        """Return the CPU time that the server has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(directory: Path, jobs: int) -> Iterator[Service]:
    """Run a server while the `with` block runs."""
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
    """Commit to the database a few times per second while the `with` block runs, as a busy service's loops do."""
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
    """Measure response rates, and the response time of each page of the job list."""

    def rate(port: int, what: Iterator[bytes]) -> float:
        taken, lasted = answer_seconds(port, what)
        return len(taken) / lasted

    bare, one = request(service.bare_port, "/bare"), request(service.port, "/v1/training-jobs/job-1", service.token)
    rate(service.bare_port, for_seconds(bare, 0.5))  # warm-up
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
    """Measure how many agent reports per second the server processes."""
    rates, length = [], 0
    for _ in range(rounds):
        before = service.cpu_seconds()
        heard = heartbeats(service.port, service.sessions, each)
        rates.append(heard.reports / max(heard.wall_seconds, service.cpu_seconds() - before))
        length = heard.bytes_per_report
    return {"heartbeat_rates": rates, "heartbeat_bytes": length, "agent_count": len(service.sessions)}


def measure_logs(*, seconds: float, say: Any) -> dict[str, Any]:
    """Follow a job's log; return the delay of each line."""
    with LocalCluster(HOME / "cluster") as cluster:
        cluster.up(ClusterOptions(nodes=1, spares=0))
        with closing(cluster.client()) as client, failures.translated():
            bench = Bench(cluster, client, HOME, say)
            bench.wait_until_warm(1)
            source = HOME / "talking"
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
            with closing(client.follow_logs(TrainingJobName=name)["EventStream"]) as stream:
                for said in stream:
                    now = time.time()
                    printed = (
                        re.fullmatch(r"at (\d+\.\d+)", event["Message"]) for event in said["LogEvents"]["Events"]
                    )
                    at = [float(match[1]) for match in printed if match]
                    late += [now - when for when in at]
    return {"follow_seconds": late}


def measure_commands(service: Service, *, count: int) -> dict[str, list[float]]:
    """Run CLI commands; return the duration of each command."""
    environment = {
        **os.environ,
        "EVERSTEP_ENDPOINT_URL": f"http://127.0.0.1:{service.port}",
        "EVERSTEP_TOKEN": service.token,
    }
    found: dict[str, list[float]] = {"everstep --help": [], "everstep jobs list": []}
    for _ in range(count + 1):
        for command, seconds in found.items():
            begun = time.perf_counter()
            done = subprocess.run(
                [str(Path(sys.executable).parent / "everstep"), *command.split()[1:]],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            seconds.append(time.perf_counter() - begun)
            if done.returncode:
                raise BenchmarkFailed(f"{command} ended with {done.returncode}: {done.stderr}")
    # drop the first run, because it reads files that are not in the page cache
    return {command: seconds[1:] for command, seconds in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, write the report, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.api", description="How fast the service answers.")
    parser.add_argument("--quick", action="store_true", help="few samples, to try the harness")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="leave the others out")
    parser.add_argument("--json", type=Path, default=HOME.with_name("api.json"), help="where the figures go")
    parser.add_argument(
        "--document", type=Path, default=ROOT / "docs" / "benchmarks-api.md", help="where the tables go"
    )
    given = parser.parse_args(arguments)
    begun = begin(is_patient=not given.quick)
    machine, say = begun.machine, begun.say

    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    found: dict[str, Any] = {"job_count": 1_000 if given.quick else JOBS}
    try:
        with serving(HOME / "server", found["job_count"]) as service:
            say(f"a server with {found['job_count']:,} jobs")
            if "requests" in given.only:
                found |= measure_requests(service, seconds=1.0 if given.quick else 4.0, pages=found["job_count"] // 100)
                say("requests")
            if "heartbeats" in given.only:
                found |= measure_heartbeats(service, rounds=2 if given.quick else 5, each=200 if given.quick else 1_000)
                say("reports of agents")
            if "commands" in given.only:
                found["command_seconds"] = measure_commands(service, count=3 if given.quick else 11)
                say("commands")
        if "logs" in given.only:
            found |= measure_logs(seconds=8 if given.quick else 40, say=say)
            say("followed logs")
    except (BenchmarkFailed, EverstepError, LocalCloudError) as error:
        print(f"the benchmark failed: {error}", file=sys.stderr)
        return 1
    run = report.Run(machine=machine, is_quick=given.quick, seconds=begun.seconds, **found)
    report.write(run, given.json, given.document)
    say(f"{given.document}, {given.json}")
    for row in report.rows(run):
        say(f"{row.what}: {row.measured:.2f} {row.unit} ({row.verdict})")
    return 2 if any(row.falls_short for row in report.rows(run)) else 3 if run.is_busy else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

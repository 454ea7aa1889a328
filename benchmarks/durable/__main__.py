"""Command of the benchmark of checkpoints in S3: `make bench-durable`. `benchmarks.command` documents the options."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

from benchmarks import command
from benchmarks.command import Begun
from benchmarks.durable import loads, uploads, writers
from benchmarks.durable.loads import Load
from benchmarks.durable.part_sink import running_part_sink
from benchmarks.durable.peers import Operation, Outcome
from benchmarks.durable.readers import READERS, SharedLoadTime, shared_load
from benchmarks.durable.report import PAGE, SYSTEMS, Comparison, Run, Sample, replaced
from benchmarks.durable.transfer import BUCKET, CLIENTS, MIB, Task
from benchmarks.durable.uploads import UploadBlock
from benchmarks.durable.writers import WRITERS, SharedUploadTime, shared_upload
from benchmarks.errors import BenchmarkFailed
from benchmarks.page import load
from tests.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedFs

ROUNDS, UPLOAD_ROUNDS, LOAD_ROUNDS = 3, 16, 8
SIZES = {"SeaweedFS": (64, 256), "moto": (64,)}
"""MiB of the transferred objects. moto reads the whole object per ranged request, so large ones are meaningless."""
QUICK_SIZES = {"SeaweedFS": (64,)}
MODEL_MIB, QUICK_MODEL_MIB = 64, 16
"""MiB of the parameters. Adam's moments add twice as many bytes."""
PEER_SECONDS = 120.0
"""Longest load or export, with preparation."""
SHARED_MEMORY = "/dev/shm"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, write its page of results, and return the exit code."""
    return command.run(PAGE, measure, argv, parts=list(PARTS), options=options)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--again", action="store_true", help="with --only: keep the other parts of the stored results")


def measure(begun: Begun) -> dict[str, Any]:
    """Measure the parts that `--only` names. With `--again`, the others come from stored results.

    Raises BenchmarkFailed if the stored results do not fit this run (see `report.replaced`).
    """
    before: Run | None = load(PAGE, begun.results) if begun.arguments.again else None
    measured = {"samples": (), **{name: list(PARTS[name](begun)) for name in begun.parts}}
    if before is None:
        return measured
    found = Run(machine=begun.machine, is_quick=begun.is_quick, seconds=begun.seconds, **measured)
    whole = replaced(before, found, begun.parts)
    return {field.name: getattr(whole, field.name) for field in fields(Run)}


def _transfers(begun: Begun) -> Iterator[Sample]:
    for server, sizes in (QUICK_SIZES if begun.is_quick else SIZES).items():
        with _served(server) as url, TemporaryDirectory(dir=SHARED_MEMORY) as folder:
            for mib in sizes:
                yield from _samples(server, url, Path(folder), mib * MIB, 1 if begun.is_quick else ROUNDS)
                begun.say(f"measured {mib} MiB against {server}")


def _uploads(begun: Begun) -> Iterator[UploadBlock]:
    rounds = 1 if begun.is_quick else UPLOAD_ROUNDS
    with running_part_sink(uploads.BYTES_PER_SECOND) as environment:
        yield from uploads.measure(begun.home / "uploads", environment, rounds=rounds, is_quick=begun.is_quick)
    begun.say("trained while checkpoints were stored")


def _loads(begun: Begun) -> Iterator[Load]:
    """Measure loads of one step from memory by as many ranks as saved it, by fewer and by more."""
    rounds, size = (1, uploads.QUICK_SIZE) if begun.is_quick else (LOAD_ROUNDS, loads.SIZE)
    yield from loads.measure(begun.home / "loads", rounds=rounds, size=size)
    begun.say("restored a step with 3, 4 and 6 ranks")


def _shared(begun: Begun) -> Iterator[SharedUploadTime]:
    """Measure uploads of one shard by one, two and four nodes, each with its own bandwidth cap."""
    environment = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": REGION}
    with _served("SeaweedFS") as url, _bucket(url, writers.BUCKET):
        for number in range(1 if begun.is_quick else ROUNDS):
            for count in WRITERS[number % len(WRITERS) :] + WRITERS[: number % len(WRITERS)]:
                yield shared_upload(url, environment, count)
            begun.say("uploaded one shard with 1, 2 and 4 nodes")


def _restores(begun: Begun) -> Iterator[SharedLoadTime]:
    """Measure loads of one shard by one, two and four nodes, each with its own bandwidth cap."""
    environment = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": REGION}
    with _served("SeaweedFS") as url, _bucket(url, writers.BUCKET):
        for number in range(1 if begun.is_quick else ROUNDS):
            for count in READERS[number % len(READERS) :] + READERS[: number % len(READERS)]:
                with TemporaryDirectory(dir=SHARED_MEMORY) as folder:
                    yield shared_load(url, environment, Path(folder), count)
            begun.say("loaded one shard with 1, 2 and 4 nodes")


def _comparisons(begun: Begun) -> Iterator[Comparison]:
    mib = QUICK_MODEL_MIB if begun.is_quick else MODEL_MIB
    with _served("SeaweedFS") as url, TemporaryDirectory(dir=SHARED_MEMORY) as folder:

        def run(name: str, system: str) -> Outcome:
            return _outcome(Operation(name=name, system=system, url=url, folder=folder, mib=mib))

        run("prepare", "all")
        for number in range(1 if begun.is_quick else LOAD_ROUNDS):
            for name, systems in SYSTEMS.items():
                for system in systems[number % len(systems) :] + systems[: number % len(systems)]:
                    yield Comparison(name=name, system=system, mib=mib, **asdict(run(name, system)))
            begun.say(f"loaded and exported a model of {mib} MiB")


def _outcome(task: Operation) -> Outcome:
    words = [sys.executable, "-m", "benchmarks.durable.peers", json.dumps(asdict(task))]
    keys = {"AWS_ENDPOINT_URL": task.url, "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    environment = {**os.environ, **keys, "AWS_REGION": REGION, "AWS_DEFAULT_REGION": REGION}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, timeout=PEER_SECONDS)
    if done.returncode:
        raise BenchmarkFailed(f"{task.name} of {task.system} failed:\n{done.stderr}")
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def _samples(server: str, url: str, folder: Path, size: int, rounds: int) -> Iterator[Sample]:
    source, target = folder / "source", folder / "target"
    source.write_bytes(os.urandom(size))
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    clients = list(CLIENTS)
    with _bucket(url) as bucket:
        for number in range(rounds):
            for client in clients[number % len(clients) :] + clients[: number % len(clients)]:
                for is_upload in (True, False):
                    target.write_bytes(bytes(size))
                    task = Task(
                        client=client,
                        is_upload=is_upload,
                        url=url,
                        access_key=ACCESS_KEY,
                        secret_key=SECRET_KEY,
                        key=client,
                        path=str(source if is_upload else target),
                        bytes=size,
                        sha256="" if is_upload else digest,
                    )
                    yield Sample(server=server, client=client, is_upload=is_upload, bytes=size, **_run(task))
                bucket.delete_object(Bucket=BUCKET, Key=client)


def _run(task: Task) -> dict[str, Any]:
    words = [sys.executable, "-m", "benchmarks.durable.transfer", json.dumps(asdict(task))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{task.client} failed:\n{done.stderr}")
    figure: dict[str, Any] = json.loads(done.stdout)
    return figure


@contextmanager
def _served(server: str) -> Iterator[str]:
    if server == "SeaweedFS":
        with SeaweedFs(folder=SHARED_MEMORY, memory="2GiB") as weed:
            yield weed.url
        return
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        moto.stop()


@contextmanager
def _bucket(url: str, name: str = BUCKET) -> Iterator[Any]:
    client = boto3.client(
        "s3", endpoint_url=url, aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY, region_name=REGION
    )
    client.create_bucket(Bucket=name)
    yield client
    client.delete_bucket(Bucket=name)
    client.close()


PARTS: Mapping[str, Callable[[Begun], Iterator[Any]]] = {
    "samples": _transfers,
    "comparisons": _comparisons,
    "shared": _shared,
    "restores": _restores,
    "uploads": _uploads,
    "loads": _loads,
}
"""Parts by the field of `report.Run` that they fill."""


if __name__ == "__main__":
    sys.exit(main())

"""Runs one upload or download by one S3 client, in its own process: `python -m benchmarks.durable.transfer JSON`.

The bytes are in a file in shared memory, like a slot. A download is compared after the measured time. A client may use
`CONNECTIONS` connections and parts of `PART_BYTES`, each with a checksum. The process prints a `Figure` as JSON.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
CONNECTIONS = 4
PART_BYTES = 32 * MIB
RANGE_BYTES = 8 * MIB
"""Bytes per request of a download. Source: Amazon S3 User Guide, performance design patterns: 8 to 16 MiB per request.
"""
BUCKET = "bench"
PIECE_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The transfer of one process."""

    client: str
    is_upload: bool
    url: str
    access_key: str
    secret_key: str
    key: str
    path: str
    """Path in shared memory."""
    bytes: int
    sha256: str = ""
    """SHA-256 of a downloaded object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The printed result of one transfer."""

    seconds: float
    cpu_seconds: float
    """CPU seconds of the client's process."""
    extra_bytes: int
    """Largest growth of private memory during the transfer."""
    is_intact: bool = True


def boto3_transfer(task: Task) -> Callable[[], None]:
    """Prepare a transfer with boto3's transfer manager."""
    from boto3.s3.transfer import TransferConfig

    client = _boto3_client(task)
    config = TransferConfig(
        multipart_threshold=PART_BYTES,
        multipart_chunksize=PART_BYTES if task.is_upload else RANGE_BYTES,
        max_concurrency=CONNECTIONS,
        preferred_transfer_client="classic",
    )

    def run() -> None:
        if task.is_upload:
            client.upload_file(task.path, BUCKET, task.key, Config=config)
        else:
            with Path(task.path).open("r+b") as file:
                client.download_fileobj(BUCKET, task.key, file, Config=config)

    return run


def awscrt_transfer(task: Task) -> Callable[[], None]:
    """Prepare a transfer with AWS's C runtime (awscrt), which divides an object itself."""
    from awscrt import auth, http, s3

    credentials = auth.AwsCredentialsProvider.new_static(task.access_key, task.secret_key)
    client = s3.S3Client(
        region="us-east-1",
        tls_mode=s3.S3RequestTlsMode.DISABLED,
        signing_config=s3.create_default_s3_signing_config(region="us-east-1", credential_provider=credentials),
        part_size=PART_BYTES if task.is_upload else RANGE_BYTES,
        memory_limit=1024 * MIB,
        max_active_connections_override=CONNECTIONS,
    )
    host = task.url.removeprefix("http://")
    headers = http.HttpHeaders([("host", host)])
    if task.is_upload:
        headers.add("content-length", str(task.bytes))
    request = http.HttpRequest("PUT" if task.is_upload else "GET", f"/{BUCKET}/{task.key}", headers)

    def run() -> None:
        if task.is_upload:
            client.make_request(
                request=request,
                type=s3.S3RequestType.PUT_OBJECT,
                send_filepath=task.path,
                fio_options=s3.S3FileIoOptions(should_stream=True),
                checksum_config=s3.S3ChecksumConfig(
                    algorithm=s3.S3ChecksumAlgorithm.CRC64NVME, location=s3.S3ChecksumLocation.TRAILER
                ),
            ).finished_future.result()
            return
        with Path(task.path).open("r+b") as file, mmap.mmap(file.fileno(), task.bytes) as target:

            def on_body(chunk: bytes, offset: int, **_: object) -> None:
                target[offset : offset + len(chunk)] = chunk

            client.make_request(
                request=request, type=s3.S3RequestType.GET_OBJECT, on_body=on_body
            ).finished_future.result()

    return run


def obstore_transfer(task: Task) -> Callable[[], None]:
    """Prepare a transfer with obstore, around Rust's object_store."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=task.url,
        access_key_id=task.access_key,
        secret_access_key=task.secret_key,
        region="us-east-1",
        virtual_hosted_style_request=False,
        checksum_algorithm="SHA256",
        client_options={"allow_http": True, "timeout": "120s"},
    )

    def run() -> None:
        with Path(task.path).open("r+b") as file, mmap.mmap(file.fileno(), task.bytes) as slot:
            if task.is_upload:
                obstore.put(
                    store,
                    task.key,
                    _pieces(slot),
                    chunk_size=PART_BYTES,
                    max_concurrency=CONNECTIONS,
                    use_multipart=True,
                )
                return

            def read(begin: int) -> None:
                end = min(task.bytes, begin + RANGE_BYTES)
                slot[begin:end] = memoryview(obstore.get_range(store, task.key, start=begin, end=end))  # type: ignore[index]

            with ThreadPoolExecutor(CONNECTIONS) as pool:
                list(pool.map(read, range(0, task.bytes, RANGE_BYTES)))

    return run


def everstep_transfer(task: Task) -> Callable[[], None]:
    """Prepare a transfer with Everstep's S3 client, which copies no parts of the slot."""
    from everstep.protocol.plan import ObjectReference
    from worker.storage.s3 import s3_store

    store = s3_store(
        {
            "AWS_ENDPOINT_URL": task.url,
            "AWS_ACCESS_KEY_ID": task.access_key,
            "AWS_SECRET_ACCESS_KEY": task.secret_key,
            "AWS_REGION": "us-east-1",
        }
    )
    where = ObjectReference(bucket=BUCKET, key=task.key)

    def run() -> None:
        with (
            Path(task.path).open("r+b") as file,
            mmap.mmap(file.fileno(), task.bytes) as slot,
            memoryview(slot) as view,
        ):
            if task.is_upload:
                store.put_stream(where, _pieces(view), task.bytes)
                return
            with store.open(where) as reader:
                for begin in range(0, task.bytes, 128 * MIB):
                    reader.read_into(view[begin : begin + 128 * MIB])

    return run


CLIENTS: dict[str, Callable[[Task], Callable[[], None]]] = {
    "boto3": boto3_transfer,
    "awscrt": awscrt_transfer,
    "obstore": obstore_transfer,
    "everstep": everstep_transfer,
}


def _pieces(slot: Any) -> Iterator[memoryview]:
    view = memoryview(slot)
    for begin in range(0, len(view), PIECE_BYTES):
        yield view[begin : begin + PIECE_BYTES]


def _boto3_client(task: Task) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.Session(
        aws_access_key_id=task.access_key, aws_secret_access_key=task.secret_key, region_name="us-east-1"
    ).client(
        "s3",
        endpoint_url=task.url,
        config=Config(max_pool_connections=CONNECTIONS, read_timeout=120, s3={"addressing_style": "path"}, proxies={}),
    )


def _private_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


class _Peak:
    """Keeps the largest private memory that a thread reads."""

    def __init__(self) -> None:
        import threading

        self._end = threading.Event()
        self.begin = self.peak = _private_bytes("RssAnon")
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._end.wait(0.01):
            self.peak = max(self.peak, _private_bytes("RssAnon"))

    def close(self) -> None:
        self._end.set()
        self._thread.join()


def measure(task: Task) -> Figure:
    """Run one transfer in this process, and measure time, CPU time and memory."""
    run = CLIENTS[task.client](task)
    with closing(_Peak()) as peak:
        usage, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        run()
        seconds, used = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    digest = hashlib.sha256(Path(task.path).read_bytes()).hexdigest() if task.sha256 else ""
    return Figure(
        seconds=seconds,
        cpu_seconds=used.ru_utime + used.ru_stime - usage.ru_utime - usage.ru_stime,
        extra_bytes=peak.peak - peak.begin,
        is_intact=digest == task.sha256,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Task(**json.loads(sys.argv[1]))))), flush=True)
    os._exit(0)  # exit at once, without waiting for the threads of the native clients

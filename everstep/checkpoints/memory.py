"""Reads the state of a running job from the memory of its nodes, like a checkpoint.

    with held(service, "gpt") as checkpoint:
        export_safetensors(checkpoint, "exported")

While the `with` block runs, the job's nodes keep the slots of one committed step and overwrite none of them. This is a
*hold*. The control plane forwards byte ranges of this step's shards, in the format of checkpoint objects. The reader
verifies every chunk by its digest.

Invariant: all bytes belong to one committed step. The hold ends when the block ends, also after an error.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from everstep.checkpoints.checkpoint import Checkpoint
from everstep.checkpoints.errors import StoreFailure
from everstep.checkpoints.stores import StoredObject
from everstep.protocol.ids import Generation, JobName, Rank, RunId, Step
from everstep.protocol.manifest import MANIFEST_VERSION, CheckpointManifest, ManifestShard

RENEWALS_PER_HOLD: Final = 4
"""Number of requests with which the reader renews a hold within the hold's time limit.

A hold makes the nodes keep the slots of one step. A node that receives no request within the time limit ends its hold.
A read extends the hold only on the node that it reads from, so all other nodes need the renewals.
"""


@contextmanager
def held(service: Any, name: str) -> Generator[Checkpoint]:
    """Make a job's nodes keep the newest committed step, and open this step as a checkpoint.

    A background thread asks the nodes repeatedly to keep the step, so the block may take any time between two reads.

    Args:
        service: client of the control plane (`everstep.client()`).
        name: name or run id of a job whose ranks train.

    Yields:
        The open checkpoint. Its manifest names the step.

    Raises:
        StoreFailure: the nodes could not hold or return the job's state. The message names the reason.
        CheckpointError: a shard is damaged.
    """
    with _failures(name):
        answer = service.hold_snapshot(TrainingJobName=name)
    snapshot = _Snapshot(service, name, answer)
    try:
        manifest = _manifest(answer)
        with (
            _renewed(service, name, snapshot.snapshot_id, answer["HoldInSeconds"] / RENEWALS_PER_HOLD),
            Checkpoint(manifest, snapshot, {int(shard.rank): shard.key for shard in manifest.shards}, {}) as checkpoint,
        ):
            yield checkpoint
    finally:
        with suppress(ClientError, BotoCoreError, ResponseParserError):
            # If this request fails, each node releases the step's slots itself, after some time without requests.
            service.release_snapshot(TrainingJobName=name, SnapshotId=snapshot.snapshot_id)


@contextmanager
def _renewed(service: Any, name: str, snapshot_id: str, seconds: float) -> Generator[None]:
    """Run a thread that renews the hold of a step's slots on the nodes repeatedly, until the `with` block ends."""
    has_ended = threading.Event()

    def renew() -> None:
        while not has_ended.wait(seconds):
            with suppress(ClientError, BotoCoreError, ResponseParserError):
                # Ignore a failed request. If the nodes have released the slots, the next read raises an error with the
                # reason.
                service.hold_snapshot(TrainingJobName=name, SnapshotId=snapshot_id)

    thread = threading.Thread(target=renew, name="everstep-renew", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _manifest(answer: Mapping[str, Any]) -> CheckpointManifest:
    generation, step = Generation(answer["Generation"]), Step(answer["Step"])
    return CheckpointManifest(
        version=MANIFEST_VERSION,
        job=JobName(answer["TrainingJobName"]),
        run=RunId(answer["RunId"]),
        generation=generation,
        parent_chain=(),
        step=step,
        shards=tuple(
            ManifestShard(
                rank=Rank(each["Rank"]),
                key=str(each["Rank"]),
                object_bytes=each["ObjectBytes"],
                etag="",
                payload_bytes=each["PayloadBytes"],
                payload_digest=each["PayloadDigest"],
                layout_hash=each["LayoutHash"],
                origin_generation=Generation(each["OriginGeneration"]),
            )
            for each in answer["Shards"]
        ),
    )


class _Snapshot:
    """Reads the shards that a job's nodes keep in memory for an export. Implements `Objects`; keys are rank numbers."""

    def __init__(self, service: Any, name: str, answer: Mapping[str, Any]) -> None:
        self.snapshot_id: str = answer["SnapshotId"]
        self._service = service
        self._name = name
        self._sizes = {str(each["Rank"]): int(each["ObjectBytes"]) for each in answer["Shards"]}
        self._read_bytes = int(answer["MaxReadBytes"])

    def open(self, key: str) -> StoredObject:
        return _HeldObject(self, key, self._sizes[key])

    def read_into(self, rank: str, begin: int, target: memoryview) -> None:
        """Read a range of a shard into `target`. A range above the limit of one request needs several requests."""
        end = begin + len(target)
        for first in range(begin, end, self._read_bytes):
            stop = min(end, first + self._read_bytes)
            with _failures(self._name):
                answer = self._service.read_snapshot(
                    TrainingJobName=self._name, SnapshotId=self.snapshot_id, Rank=int(rank), Begin=first, End=stop
                )
                found = answer["Body"].read()
            if len(found) != stop - first:
                raise StoreFailure(f"rank {rank} of {self._name}: {len(found)} of {stop - first} bytes received")
            target[first - begin : stop - begin] = found


class _HeldObject(StoredObject):
    def __init__(self, snapshot: _Snapshot, rank: str, size: int) -> None:
        super().__init__(f"rank {rank} in memory", size)
        self._snapshot = snapshot
        self._rank = rank

    def read_into(self, begin: int, target: memoryview) -> None:
        if begin + len(target) > self.size:
            raise StoreFailure(f"{self.name} ends at byte {self.size}")
        self._snapshot.read_into(self._rank, begin, target)

    def close(self) -> None:
        pass


@contextmanager
def _failures(name: str) -> Generator[None]:
    """Convert errors of the service into `StoreFailure`, with the service's message."""
    try:
        yield
    except ClientError as error:
        raise StoreFailure(f"{name}: {error.response.get('Error', {}).get('Message') or error}") from error
    except (BotoCoreError, ResponseParserError) as error:
        raise StoreFailure(f"{name}: {error}") from error

"""A running job's snapshot is read like a checkpoint: the reader verifies it, renews its hold, and releases it."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from botocore.exceptions import ClientError
from safetensors.numpy import load_file

from everstep.checkpoints.errors import CorruptCheckpoint, StoreFailure
from everstep.checkpoints.export import export_safetensors
from everstep.checkpoints.memory import held
from tests.unit.everstep.checkpoints.stored import Stored, object_of, payload_of
from tests.unit.everstep.conftest import run as run

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)


class Nodes:
    """A fake client of a control plane whose nodes hold one shard."""

    def __init__(self, weight: np.ndarray = WEIGHT) -> None:
        payload, offset = payload_of([Stored("model/w", weight)])
        self.data, self.shard, *_ = object_of(0, payload, offset)
        self.calls: list[str] = []
        self.ranges: list[tuple[int, int]] = []
        self.refusal = ""
        self.hold_seconds = 120.0
        self.renewed = threading.Semaphore(0)
        """Released once for each renewal of the hold."""

    def hold_snapshot(self, TrainingJobName: str, SnapshotId: str = "") -> dict[str, Any]:
        self.calls.append(f"hold {SnapshotId}".strip())
        if SnapshotId:
            self.renewed.release()
        self._refuse()
        return {
            "TrainingJobName": "job",
            "RunId": "ab" * 16,
            "SnapshotId": "1-7-a",
            "Generation": 1,
            "Step": 7,
            "HoldInSeconds": self.hold_seconds,
            "MaxReadBytes": 100,
            "Shards": [
                {
                    "Rank": 0,
                    "OriginGeneration": 2,
                    "ObjectBytes": len(self.data),
                    "PayloadBytes": self.shard.payload_bytes,
                    "PayloadDigest": self.shard.payload_digest,
                    "LayoutHash": self.shard.layout_hash,
                }
            ],
        }

    def read_snapshot(self, TrainingJobName: str, SnapshotId: str, Rank: int, Begin: int, End: int) -> dict[str, Any]:
        self._refuse()
        self.ranges.append((Begin, End))
        return {"Body": io.BytesIO(self.data[Begin:End])}

    def release_snapshot(self, TrainingJobName: str, SnapshotId: str) -> dict[str, Any]:
        self.calls.append(f"release {SnapshotId}")
        return {"SnapshotId": SnapshotId}

    def _refuse(self) -> None:
        if self.refusal:
            raise ClientError({"Error": {"Code": "ConflictException", "Message": self.refusal}}, "HoldSnapshot")


def test_a_snapshot_is_exported_in_small_reads_and_released(tmp_path: Path) -> None:
    nodes = Nodes()
    with held(nodes, "gpt") as checkpoint:
        assert checkpoint.manifest.step == 7
        export_safetensors(checkpoint, str(tmp_path))
    assert np.array_equal(load_file(tmp_path / "model.safetensors")["w"], WEIGHT)
    assert all(end - begin <= 100 for begin, end in nodes.ranges)
    assert nodes.calls == ["hold", "release 1-7-a"]


def test_a_hold_is_renewed_between_reads() -> None:
    nodes = Nodes()
    nodes.hold_seconds = 0.01
    with held(nodes, "gpt") as checkpoint:
        assert nodes.renewed.acquire(timeout=30)
        nodes.refusal = "the control plane starts"
        assert nodes.renewed.acquire(timeout=30)
        assert nodes.renewed.acquire(timeout=30), "a failed renewal is repeated"
        nodes.refusal = ""
        checkpoint.read(checkpoint.tensors["model/w"])
    assert nodes.calls[-1] == "release 1-7-a"


def test_damaged_memory_is_found_and_the_hold_ends() -> None:
    nodes = Nodes()
    nodes.data = nodes.data[:-1] + bytes([nodes.data[-1] ^ 1])
    with pytest.raises(CorruptCheckpoint), held(nodes, "gpt"):
        pass
    assert nodes.calls == ["hold", "release 1-7-a"]


def test_a_refusal_is_an_error_with_the_services_words() -> None:
    nodes = Nodes()
    nodes.refusal = "the training job 'gpt' is queued"
    with pytest.raises(StoreFailure, match="gpt: the training job 'gpt' is queued"), held(nodes, "gpt"):
        pass
    assert nodes.calls == ["hold"]


def test_too_few_bytes_are_an_error() -> None:
    nodes = Nodes()
    size = len(nodes.data)
    nodes.data = nodes.data[: size - 3]
    with pytest.raises((StoreFailure, CorruptCheckpoint)), held(nodes, "gpt"):
        pass
    assert nodes.calls[-1] == "release 1-7-a"


def test_the_command_exports_the_newest_committed_step(run: Any, tmp_path: Path) -> None:
    nodes = Nodes()
    answers = {name: getattr(nodes, name) for name in ("hold_snapshot", "read_snapshot", "release_snapshot")}
    words = ("checkpoints", "export", "gpt", "--from", "memory", "--to", str(tmp_path / "to"))
    code, out, error, _ = run(*words, **answers)
    assert (code, error) == (0, "")
    assert out == f"exported 1 tensor of 24 B at step 7 to {tmp_path / 'to'}: model.safetensors\n"
    code, out, _, _ = run(*words[:-1], str(tmp_path / "json"), "--output", "json", **answers)
    assert json.loads(out)["Step"] == 7
    assert "S3Uri" not in json.loads(out)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("7", "--from", "memory"), "leave out STEP"),
        (("--from", "memory", "--generation", "2"), "leave out STEP"),
        ((), "STEP is missing"),
    ],
)
def test_options_that_contradict_each_other_are_refused(run: Any, tmp_path: Path, words: Any, why: str) -> None:
    code, _, error, calls = run("checkpoints", "export", "gpt", *words, "--to", str(tmp_path / "to"))
    assert code != 0
    assert why in " ".join(error.split())
    assert calls == []

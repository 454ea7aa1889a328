"""Corruptions of S3 objects and manifests, read by `open_checkpoint`, an export, and the restore of an agent.

A folder in place of S3 contains the objects of two steps and two ranks, for `open_checkpoint`. The restore of an agent
(`download_shard`) reads from an object store in memory.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from everstep.checkpoints import open_checkpoint
from everstep.checkpoints.errors import CheckpointError
from everstep.checkpoints.export import WHOLE, export_safetensors
from everstep.protocol.ids import Generation, Rank, Step
from everstep.protocol.manifest import decode_manifest
from everstep.protocol.parts import parts_of_range
from everstep.protocol.plan import ObjectReference, ShardSource
from everstep.protocol.safetensors import LENGTH, plan_restore
from tests.corruption.outcomes import Counts, Outcome, flipped, truncated, without_part
from tests.fakes.storage import MemoryObjectStore
from tests.unit.everstep.checkpoints.stored import Stored, payload_of, store, with_text
from tests.unit.worker.storage.slots import JOB, RUN
from worker.core.slots import Content
from worker.errors import CorruptCheckpoint, StorageError
from worker.shm.held_files import HeldFiles
from worker.shm.store import SlotStore
from worker.storage.downloads import download_shard

RANKS = 2
BUCKET = "bucket"


def tensors(seed: int) -> dict[int, list[Stored]]:
    """Return the tensors of one step: two parts of a flat ZeRO range, one per rank, and whole tensors.

    The bias is equal on both ranks. A checkpoint stores it once, in the object for tensors that are equal on all ranks.
    """
    draw = np.random.default_rng(seed)
    whole = draw.standard_normal((20, 30)).astype(np.float32)
    edges = (0, 317, 600)
    bias = draw.standard_normal(50).astype(np.float32)
    return {
        rank: [
            Stored(
                "master",
                whole.ravel()[edges[rank] : edges[rank + 1]],
                parts_of_range("model/w", (20, 30), edges[rank], edges[rank + 1], 0),
            ),
            Stored(f"model/b{rank}", draw.standard_normal(70).astype(np.float32)),
            Stored("model/bias", bias, is_replicated=True),
            Stored("optimizer/w/step", np.float32(seed)),
            Stored("model/frozen", draw.standard_normal(90).astype(np.float32), is_frozen=True),
        ]
        for rank in range(RANKS)
    }


Found = tuple[tuple[str, str, int, int], dict[str, bytes]]
"""The data that a reader has loaded: job, run, generation and step, and the bytes of each tensor."""


class Objects:
    """Two checkpoints in folders, a new and an older one, and the readers that open corrupted copies of them.

    Args:
        folder: empty directory for the objects and for slots.
        draw: source of all random choices.
    """

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._draw = draw
        self._manifest = store(folder / "new", tensors(7))
        older = store(folder / "old", tensors(5))
        self._older = {path.name: path.read_bytes() for path in (folder / "old").rglob("*") if path.is_file()}
        old_manifest = with_text(with_text(older.read_bytes(), "step=7", "step=5"), '"step": 7', '"step": 5')
        self._older["manifest.json"] = old_manifest
        self._paths = {path.name: path for path in (folder / "new").rglob("*") if path.is_file()}
        self._sound = {name: path.read_bytes() for name, path in self._paths.items()}
        self._expected = self._read()
        self._target = folder / "exported"
        self._model = self._exported()
        shutil.rmtree(self._target)
        self._keys = {name: str(path.relative_to(folder / "new")) for name, path in self._paths.items()}
        """Key of each object, by the name of its file."""
        self._frozen = {rank: self._shared_of(rank, is_frozen=True) for rank in range(RANKS)}
        """Name of the object that holds a rank's frozen tensor, by rank."""
        self._replicated = self._shared_of(0, is_frozen=False)
        """Name of the object that holds the tensor that is equal on both ranks."""
        new_names = {"frozen": sorted(self._frozen.values()), "replicated": [self._replicated]}
        for kind, names in new_names.items():
            older_data = [path.read_bytes() for path in sorted((folder / "old").rglob(f"{kind}/*"))]
            self._older |= dict(zip(names, older_data, strict=True))
        self._shards = {int(shard.rank): shard for shard in decode_manifest(self._sound["manifest.json"]).shards}
        self._payloads = {rank: payload_of(stored)[0] for rank, stored in tensors(7).items()}
        self._objects = MemoryObjectStore(BUCKET)
        self._slots = SlotStore(HeldFiles(), memory_bytes=1 << 20)
        self._slots.open_run(JOB, RUN)

    def close(self) -> None:
        """Close the store of slots."""
        self._slots.close()

    def _shared_of(self, rank: int, *, is_frozen: bool) -> str:
        data = self._sound[f"rank={rank}.safetensors"]
        (length,) = LENGTH.unpack_from(data)
        plan = plan_restore(data[LENGTH.size : LENGTH.size + length], len(data))
        (found,) = [each.group.sha256 for each in plan.shared if each.is_frozen is is_frozen]
        return f"{found}.safetensors"

    def _read(self) -> Found:
        with open_checkpoint(str(self._manifest)) as checkpoint:
            facts = checkpoint.manifest
            return (facts.job, facts.run, facts.generation, facts.step), {
                name: bytes(checkpoint.read(tensor)) for name, tensor in checkpoint.tensors.items()
            }

    def _changed(self, kind: str, name: str) -> dict[str, bytes]:
        """Return the files that a corruption changes, with their new content."""
        data = self._sound[name]
        match kind:
            case "bit flip":
                return {name: flipped(data, self._draw)}
            case "truncation":
                return {name: truncated(data, self._draw)}
            case "dropped part":
                return {name: without_part(data, self._draw)}
            case "swapped shards":
                names = [f"rank={rank}.safetensors" for rank in range(RANKS)]
                if name == "manifest.json":
                    changed = data
                    for one, other in ((names[0], "x"), (names[1], names[0]), ("x", names[1])):
                        changed = changed.replace(one.encode(), other.encode())
                    return {name: changed}
                if name not in names:
                    names = [self._frozen[rank] for rank in range(RANKS)]
                return {names[0]: self._sound[names[1]], names[1]: self._sound[names[0]]}
            case "stale generation":
                several = [each for each in self._sound if self._draw.random() < 0.5 or each == name]
                return {each: self._older[each] for each in several}
        raise AssertionError(kind)

    def open(self, kind: str, counts: Counts) -> None:
        """Plant a corruption in an object or in the manifest, and read the whole checkpoint."""
        name = self._draw.choice(sorted(self._sound))
        place = "S3 manifest" if name == "manifest.json" else "S3 object"
        files = self._changed(kind, name)
        for each, data in files.items():
            self._paths[each].write_bytes(data)
        try:
            found = self._read()
        except CheckpointError:
            outcome = Outcome.REFUSED
        else:
            outcome = Outcome.HARMLESS if found == self._expected else Outcome.LOADED
        counts.add(place, kind, outcome, f"{sorted(files)} {_difference(files, self._sound)}")
        for each in files:
            self._paths[each].write_bytes(self._sound[each])

    def export(self, kind: str, counts: Counts) -> None:
        """Plant a corruption in an object or in the manifest, and export the model.

        A refused export leaves no model.
        """
        name = self._draw.choice(sorted(self._sound))
        files = self._changed(kind, name)
        for each, data in files.items():
            self._paths[each].write_bytes(data)
        try:
            found: dict[str, bytes] | None = self._exported()
        except CheckpointError:
            found = None
        if found is None:
            outcome = Outcome.LOADED if (self._target / WHOLE).exists() else Outcome.REFUSED
        else:
            outcome = Outcome.HARMLESS if found == self._model else Outcome.LOADED
        counts.add("export", kind, outcome, f"{sorted(files)} {_difference(files, self._sound)}")
        shutil.rmtree(self._target, ignore_errors=True)
        for each in files:
            self._paths[each].write_bytes(self._sound[each])

    def _exported(self) -> dict[str, bytes]:
        """Export the model of the checkpoint to a folder, and return the bytes of each exported tensor."""
        with open_checkpoint(str(self._manifest)) as checkpoint:
            export_safetensors(checkpoint, str(self._target))
        return {name: tensor.tobytes() for name, tensor in load_file(self._target / WHOLE).items()}

    async def restore(self, kind: str, counts: Counts) -> None:
        """Plant a corruption in an object, and restore the shard as an agent does."""
        rank = Rank(self._draw.randrange(RANKS))
        own, keys = f"rank={rank}.safetensors", self._keys
        names = own, self._frozen[rank], self._replicated
        name = self._draw.choice(names)
        files = {each: self._sound[each] for each in names}
        files |= {each: data for each, data in self._changed(kind, name).items() if each in files}
        for each, content in files.items():
            self._objects.put_bytes(ObjectReference(bucket=BUCKET, key=keys[each]), content)
        where = ObjectReference(bucket=BUCKET, key=keys[own])
        shard, content = self._shards[rank], Content(Generation(2), Step(7))
        source = ShardSource(
            kind="s3",
            origin_generation=content.origin,
            step=content.step,
            digest=bytes.fromhex(shard.payload_digest),
            payload_bytes=shard.payload_bytes,
            object=where,
        )
        try:
            await download_shard(self._objects, source, self._slots, rank=rank, content=content, keep=(), slot_count=1)
        except (CorruptCheckpoint, StorageError):
            outcome = Outcome.REFUSED
        else:
            outcome = Outcome.HARMLESS
        found = self._slots.sealed(rank, content)
        if found is not None:
            with found.file.payload() as view:
                if outcome is Outcome.REFUSED or bytes(view) != self._payloads[rank]:
                    outcome = Outcome.LOADED
            found.file.empty()
        counts.add("S3 object, restore", kind, outcome, _difference(files, self._sound))


def _difference(files: dict[str, bytes], sound: dict[str, bytes]) -> str:
    """Return the first difference of each file, for the report of a bug."""
    found = []
    for name, data in files.items():
        before = sound[name]
        first = next((at for at, pair in enumerate(zip(data, before, strict=False)) if pair[0] != pair[1]), len(data))
        around = slice(max(0, first - 30), first + 30)
        found.append(f"{name} byte {first} of {len(before)}: {before[around]!r} became {data[around]!r}")
    return "; ".join(found)

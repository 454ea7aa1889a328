"""Holds a saved state in plain memory instead of a slot file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import torch

from everstep.protocol.ids import Step
from everstep.training.restore import SlotValues, Snapshot
from everstep.training.saved_tensors import SavedTensors
from everstep.training.state import RankState


class Saved(SavedTensors):
    """Saved tensors that are all available from the start."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], **options: int) -> None:
        super().__init__(**options)
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def snapshot_of(source: RankState) -> Snapshot:
    """Return a copy of a rank's state, as a save makes it."""
    observed = source.observe()
    values = msgspec.msgpack.decode(observed.values, type=SlotValues)
    return Snapshot(Step(1), Saved({item.name: item.tensor.detach().clone() for item in observed.tensors}), values)


def carry(source: RankState, target: RankState) -> None:
    """Copy one rank's state into another rank's, as a save and a restore would."""
    snapshot = snapshot_of(source)
    target.load(snapshot)
    target.complete(snapshot)

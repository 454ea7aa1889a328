"""Saved tensors without a slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from everstep.training.saved_tensors import SavedTensors


class Saved(SavedTensors):
    """Tensors that are all there."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

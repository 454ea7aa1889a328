"""Sizes of the measured jobs. The harness uses this module, too, so it does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

SETTLE_STEPS = 4
"""Steps at the start of a block of `uploading` that are not counted. The checkpoint is of the last of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes of the model and of a rank's batch."""

    layers: int
    width: int
    batch: int = 1

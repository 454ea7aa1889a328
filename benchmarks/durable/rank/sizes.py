"""Defines the sizes of the measured jobs, without torch, which the benchmark's main process must not import."""

from __future__ import annotations

from dataclasses import dataclass

SETTLE_STEPS = 4
"""Uncounted steps at the start of a block in `rank.uploading`, the last of which the checkpoint stores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes of the model and a rank's batch."""

    layers: int
    width: int
    batch: int = 1

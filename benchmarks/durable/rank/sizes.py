"""Sizes of the measured jobs. The harness uses this module, too, so it does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

SETTLE_STEPS = 4
"""Uncounted steps at the start of each block of `rank.uploading`. The checkpoint stores the last of these steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes of the model and of a rank's batch."""

    layers: int
    width: int
    batch: int = 1

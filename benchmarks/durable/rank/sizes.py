"""Defines the sizes of the measured jobs.

The module does not import torch, because the benchmark's main process also uses it and must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

SETTLE_STEPS = 4
"""Number of uncounted steps at the start of each block of steps in `rank.uploading`.

The block's checkpoint stores the last of these steps.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes of the model and of a rank's batch."""

    layers: int
    width: int
    batch: int = 1

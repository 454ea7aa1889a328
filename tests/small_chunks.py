"""Smaller chunks, so that a short payload has several of them.

The chunk size is a constant of the slot format: agents, ranks and readers of checkpoints compute it from the size of
the payload alone. No object therefore accepts the chunk size as an option.
"""

from __future__ import annotations

import pytest

from everstep.protocol import slot
from worker.core.parity import Stripe


def use_small_chunks(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    """Divide all payloads into chunks of `chunk_bytes` bytes until the end of the test."""
    monkeypatch.setattr(slot, "CHUNK_BYTES", chunk_bytes)
    # The default argument of a stripe is a copy of the constant.
    monkeypatch.setattr(Stripe.__init__, "__defaults__", (chunk_bytes,))

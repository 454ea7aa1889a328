"""Lets agents send snapshots over a slow link without a rate limit, for comparison.

Python imports this module at its start if PYTHONPATH contains this folder.
"""

from __future__ import annotations

from worker.core import slow_link

slow_link.ROOM_RATIO = 1e6

"""Contains what users import and run: the training hooks, the client and the command line.

    import everstep
    client = everstep.client()        # a boto3 client of the service

Invariant: this package imports none of `control_plane`, `worker` and `infra`, which run in other processes. Every
training script imports `everstep`, so the import must stay fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.sdk import client as client

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the client or a package when a program first accesses it, because their dependencies are slow to import.

    A script that imports only `everstep` therefore finds `everstep.training` in every process, and not only in those
    whose template has imported it.
    """
    if name == "client":
        from everstep.sdk import client

        return client
    if name in ("checkpoints", "integrations", "training"):
        return importlib.import_module(f"everstep.{name}")
    raise AttributeError(f"module 'everstep' has no attribute {name!r}")

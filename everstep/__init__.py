"""Everstep: all that user code imports: the training hooks, the client and the command line, over one wire.

    import everstep
    client = everstep.client()        # a boto3 client of the service

Invariant: nothing here imports the service; `control_plane`, `worker` and `infra` are processes of their own. Ranks
import this, so it is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.sdk import client as client

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the client, and botocore with it, only once it is asked for."""
    if name == "client":
        from everstep.sdk import client

        return client
    raise AttributeError(f"module 'everstep' has no attribute {name!r}")

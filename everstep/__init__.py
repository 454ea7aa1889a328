"""Contains what users import and run: the training hooks, the client and the command line.

    import everstep
    client = everstep.client()        # a boto3 client of the service

Invariant: this package imports none of `control_plane`, `worker` and `infra`, which run in other processes. Every
training script imports `everstep`, so the import must stay fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.sdk import client as client

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the SDK when a program first accesses `everstep.client`: its dependency botocore is slow to import."""
    if name == "client":
        from everstep.sdk import client

        return client
    raise AttributeError(f"module 'everstep' has no attribute {name!r}")

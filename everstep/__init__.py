"""Everstep: all that user code imports: the training hooks, the client and the command line, over one wire.

Invariant: nothing here imports the service; `control_plane`, `worker` and `infra` are processes of their own.
"""

__version__ = "0.1.0"

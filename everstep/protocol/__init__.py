"""Defines the wire format: messages between Everstep processes, and layouts of shared memory and stored objects.

Invariant: every value that this package decodes has checked types, so callers need no further type checks. The package
contains no sockets, no clocks and no torch.
"""

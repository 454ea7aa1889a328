"""The wire format: messages between Everstep processes, and the layouts of shared memory and stored objects.

Invariant: every value that this package decodes has checked types, so callers need no further type checks. The package
defines messages and layouts only. It uses neither sockets nor clocks nor torch.
"""

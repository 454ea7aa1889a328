"""The wire format: messages between Everstep processes, and the layouts of shared memory and stored objects.

Invariant: a value that this package decodes is well formed, so its users check no types again. The package defines
messages and layouts only. It does not use sockets, clocks or torch.
"""

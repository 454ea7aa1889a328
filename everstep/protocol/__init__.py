"""Defines the wire format: messages between Everstep processes, and layouts of shared memory and stored objects.
Invariant: the package checks the type of every value that it decodes. It opens no sockets, reads no clocks and does not
import torch.
"""

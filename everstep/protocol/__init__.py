"""The wire: everything that two Everstep processes say to each other, and the bytes they share.

Invariant: a value that decodes here is well formed; nothing behind this package checks types again. It knows messages
and layouts, never sockets, files, clocks or torch.
"""

"""A cloud on one machine: AWS's APIs served on loopback, instances as process trees, and a control plane started beside them.

Invariant: nothing here ever speaks to another machine. It knows Everstep only from outside: its command line, its
client, its file names, and the layout of a slot, to break one.
"""

"""A cloud on one machine: AWS's APIs on loopback, instances as process trees, and a control plane.

Invariant: the local cloud never connects to another machine. It uses Everstep only through its command line, its
client, its file names, and the layout of a slot, which one fault corrupts.
"""

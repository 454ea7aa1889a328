"""Runs a cloud on one machine: AWS's APIs on loopback, instances as process trees, and a control plane.

Invariant: the local cloud never connects to another machine. Of Everstep, it uses only the command line, the client,
the names of files, and the layout of slots. A slot is a file with one shard in a node's memory. The fault that corrupts
a shard needs the layout.
"""

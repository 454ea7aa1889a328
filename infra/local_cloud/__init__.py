"""Runs a cloud on one machine: AWS's APIs on loopback, instances as process trees, and a control plane.

Invariant: it never connects to another machine. From Everstep's packages, it uses only the command line, the API
client, file names, and the layout of slots, for the fault that corrupts a shard.
"""

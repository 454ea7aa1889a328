"""Runs a cloud on one machine: AWS's APIs on loopback, instances as process trees, and a control plane.

Invariant: the local cloud never connects to another machine. It depends only on Everstep's command line, client, file
names and slot layout. One fault corrupts a slot.
"""

"""Reads health facts of this node from the kernel and from NVML, with one module per source.

`worker.core.node_health` derives faults from these facts.
"""

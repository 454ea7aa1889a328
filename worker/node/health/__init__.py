"""Health facts of this node, read from the kernel and from NVML; one module per source.

`worker.core.node_health` derives faults from these facts.
"""

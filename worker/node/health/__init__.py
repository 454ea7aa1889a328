"""What this node suffers: facts read from the kernel and from NVML, one module a source.

What they mean is judged in `worker.core.node_health`.
"""

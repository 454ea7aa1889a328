"""Programs that use the device.

Each program has a separate process, because a CUDA error breaks all later work of its process.
"""

"""Programs of this benchmark that use the device.

Each program runs in its own process, because a CUDA error makes all later CUDA calls of the process fail.
"""

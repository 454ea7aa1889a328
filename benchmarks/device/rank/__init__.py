"""Programs that use the device, one process each, because a CUDA error makes all later calls of a process fail."""

"""What runs on the device, each in a process of its own: a CUDA error spoils all that its process does afterwards."""

"""Programs on the device, each in a process of its own: a CUDA error breaks all later work of its process."""

"""The machine: network cards, ports, instance metadata, device health, process priority, and the ranks' users."""

"""Access to the machine: network cards, ports, instance metadata, device health, priorities, and ranks' users."""

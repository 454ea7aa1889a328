"""The machine: network cards, ports, metadata, health, process priority, the user of ranks."""

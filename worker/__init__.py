"""The node agent: it runs a job's ranks and keeps snapshots of their state in the memory of several nodes."""

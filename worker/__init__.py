"""The node agent: it runs a job's ranks and keeps every optimizer step in the memory of the nodes."""

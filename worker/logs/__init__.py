"""Log lines of ranks: stored on disk, copied to other nodes, and uploaded to the object store."""

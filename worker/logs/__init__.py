"""Log lines of ranks: stored on disk, replicated to peers, and uploaded to the object store."""

"""Log lines of ranks: on disk, on peers, and on their way to the object store."""

"""Lines that ranks print: on disk, on peers, and on their way to the object store."""

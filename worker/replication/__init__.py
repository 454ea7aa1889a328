"""Between agents: authenticated sessions, shards in chunks, rounds over the tree."""

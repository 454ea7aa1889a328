"""Communication between agents: authenticated sessions, transfers of shards, and rounds over the tree of agents."""

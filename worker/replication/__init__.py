"""Communication between agents: authenticated sessions, transfers of shards, and the rounds of the step protocol."""

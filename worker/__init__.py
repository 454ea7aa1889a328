"""The node agent: keeping every optimizer step safe in memory, and ranks running."""

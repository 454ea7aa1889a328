"""Training programs of the ranks, one per system. All programs train the same model and write the same trace format."""

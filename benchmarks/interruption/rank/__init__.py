"""Programs of the ranks, one per system. They share one model and one format of traces."""

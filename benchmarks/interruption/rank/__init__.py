"""Programs of the ranks under every system: one model, and one format of traces."""

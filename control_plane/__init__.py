"""The control plane: what should be true of fleets and jobs, and making it so."""

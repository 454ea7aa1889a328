"""The control plane: stores the desired state of fleets and jobs, and enforces it."""

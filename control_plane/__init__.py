"""The control plane: stores the desired state of fleets and jobs, and reconciles AWS and agents with it."""

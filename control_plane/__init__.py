"""The control plane stores the desired state of fleets and jobs, and makes AWS and the agents match it."""

"""The agent process of a node, and its connection to the control plane."""

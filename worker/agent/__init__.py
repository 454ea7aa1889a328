"""The agent's connection to the control plane, its commands and reports, its promise and its log."""

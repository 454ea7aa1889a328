"""The inputs of the control plane's decisions: observations and stored records, one module per kind of object."""

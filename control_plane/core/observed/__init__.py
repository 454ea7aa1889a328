"""The inputs of the decisions: observations and stored records, one module per kind of object."""

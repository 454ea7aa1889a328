"""Observations and stored records of the loops: the inputs of both `decide` functions, one module per noun."""

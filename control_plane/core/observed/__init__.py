"""What the loops observe and store: the inputs of both `decide` functions, one module per noun."""

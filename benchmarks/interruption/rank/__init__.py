"""What the ranks of every system run: one model, one way to write down what was finished when."""

"""One generation on one node: loading, ranks, rounds, and the end of all of it."""

"""Benchmark of the API server's response times (`make bench-api`)."""

"""Benchmark of the dashboard in Chromium: `make bench-dashboard`."""

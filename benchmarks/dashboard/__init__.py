"""How fast the dashboard is, in Chromium: `make bench-dashboard`."""

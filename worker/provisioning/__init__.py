"""Provides what a job's ranks need before they start: sources, packages, input channels, secrets, credentials."""

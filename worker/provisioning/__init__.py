"""What a job's ranks need before they start: sources, packages, inputs, credentials."""

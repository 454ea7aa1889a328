"""Routes of the API, one module per resource; each has a `router`."""

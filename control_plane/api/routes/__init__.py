"""Contains the routes of the API, one module per resource. Each module defines a `router`."""

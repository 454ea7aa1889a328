"""How fast the service answers (`make bench-api`)."""

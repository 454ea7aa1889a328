"""Adapters, one per compared system. Each adapter uses its system as the system's documentation shows."""

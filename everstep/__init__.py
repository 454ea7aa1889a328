"""Everstep: everything that user code imports."""

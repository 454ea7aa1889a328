"""Everstep: everything that user code imports."""

__version__ = "0.1.0"

"""Generators of all descriptions of the API, from its routes and models.

Invariant: only `python -m control_plane.contract` writes the generated files. `make check` fails if a generated file is
out of date.
"""

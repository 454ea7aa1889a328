"""Generators of all descriptions of the API from its routes and models.

They write the OpenAPI document, the client's botocore model and type stubs, the dashboard's TypeScript types, and the
reference pages of the documentation.

Invariant: only `python -m control_plane.contract` writes the generated files. `make check` fails if a generated file is
out of date.
"""

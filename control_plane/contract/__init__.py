"""Generators of all descriptions of the API from its routes and models.

They write the OpenAPI document, the client's botocore model and stubs, the dashboard's types, and the reference pages.
`make check` fails if a generated file is out of date.
"""

"""Errors of the generator.

ContractError            the API has something that the generated clients cannot say
"""

from __future__ import annotations


class ContractError(Exception):
    """The API has something that the generated clients cannot say: a fault of whoever wrote the route or the model."""

"""Errors of the generator that creates the API's clients and descriptions from the OpenAPI document.

ContractError            the generated clients cannot represent a part of the API
"""

from __future__ import annotations


class ContractError(Exception):
    """The generated clients cannot represent a part of the API.

    The author of the route or model must change it.
    """

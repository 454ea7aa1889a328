"""Errors of the generator.

ContractError            the generated clients cannot represent a part of the API
"""

from __future__ import annotations


class ContractError(Exception):
    """The generated clients cannot represent a part of the API.

    The author must change the route or model.
    """

"""Errors of the generator of the API's clients."""

from __future__ import annotations


class ContractError(Exception):
    """The generated clients cannot represent a part of the API. The author of the route or model must change it."""

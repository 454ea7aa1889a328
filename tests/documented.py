"""Check of AWS calls against AWS's documentation: filter names and enumerations. botocore checks types only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from botocore.model import OperationModel, Shape

from infra.local_cloud.documented import filter_names, is_documented

GROWING: Final = frozenset({"InstanceType"})
"""Enumerations that are not checked, because AWS extends them every month and botocore's list is incomplete."""
SHOWN_VALUES: Final = 12


def undocumented(operation: OperationModel, parameters: Mapping[str, Any]) -> list[str]:
    """Return the undocumented filters and values in the parameters of a call.

    Args:
        operation: botocore's model of the called operation.
        parameters: the call's parameters as passed to boto3.

    Returns:
        One sentence for each unknown filter and for each value outside of its enumeration.
    """
    names = filter_names(operation)
    filters = (
        [given["Name"] for given in parameters.get("Filters", ()) if isinstance(given, Mapping) and "Name" in given]
        if names
        else []
    )
    wrong = [f"{operation.name} has no filter {name!r}" for name in filters if not is_documented(name, names)]
    shape = operation.input_shape
    return wrong + (
        [] if shape is None else [f"{operation.name}: {said}" for said in _unknown_values(shape, parameters, "")]
    )


def _unknown_values(shape: Shape, value: Any, where: str) -> Iterator[str]:
    if shape.type_name == "structure" and isinstance(value, Mapping):
        for name, member in shape.members.items():
            if name in value:
                yield from _unknown_values(member, value[name], f"{where}.{name}".lstrip("."))
    elif shape.type_name == "list" and isinstance(value, (list, tuple)):
        for item in value:
            yield from _unknown_values(shape.member, item, where)
    elif shape.type_name == "map" and isinstance(value, Mapping):
        for item in value.values():
            yield from _unknown_values(shape.value, item, where)
    elif (
        isinstance(value, str)
        and shape.name not in GROWING
        and getattr(shape, "enum", None)
        and value not in shape.enum
    ):
        yield (
            f"{where} {value!r} is none of "
            f"{', '.join(shape.enum[:SHOWN_VALUES])}{', …' if len(shape.enum) > SHOWN_VALUES else ''}"
        )

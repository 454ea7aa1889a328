"""Conversions of names and documentation from the service model to other formats. Pure."""

from __future__ import annotations

import html
import re
from typing import Any

Json = dict[str, Any]


def python_name(operation: str) -> str:
    """Return the boto3 method name of an operation, for example `create_training_job` for `CreateTrainingJob`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", operation).lower()


def prose(described: Json) -> str:
    """Return the documentation of an element of a service model as plain text, or an empty string."""
    text: str = described.get("documentation", "")
    return html.unescape(text.removeprefix("<p>").removesuffix("</p>").replace("</p><p>", " "))


def structures(model: Json) -> dict[str, Json]:
    """Return the structures that a service model's requests and responses use, except errors and arbitrary JSON."""
    return {
        name: shape
        for name, shape in model["shapes"].items()
        if shape["type"] == "structure" and not shape.get("document") and not shape.get("exception")
    }


def error_names(model: Json) -> list[str]:
    """Return the names of a service model's error types."""
    return [name for name, shape in model["shapes"].items() if shape.get("exception")]

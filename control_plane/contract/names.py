"""How the words of the contract are written elsewhere. Pure."""

from __future__ import annotations

import html
import re
from typing import Any

Json = dict[str, Any]


def python_name(operation: str) -> str:
    """Return the name of an operation as a method of a boto3 client: `CreateTrainingJob` is `create_training_job`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", operation).lower()


def prose(described: Json) -> str:
    """Return the documentation of something in a service model as plain text; empty for none."""
    return html.unescape(described.get("documentation", "").removeprefix("<p>").removesuffix("</p>"))


def structures(model: Json) -> dict[str, Json]:
    """Return the structures of a service model that hold what is sent or answered, errors and free JSON excepted."""
    return {
        name: shape
        for name, shape in model["shapes"].items()
        if shape["type"] == "structure" and not shape.get("document") and not shape.get("exception")
    }


def error_names(model: Json) -> list[str]:
    """Return the types of errors of a service model."""
    return [name for name, shape in model["shapes"].items() if shape.get("exception")]

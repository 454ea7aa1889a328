"""The API as others rely on it: `api.json` beside this file is what was promised. A change here is a change for every caller.

python -m tests.contract.test_api      writes api.json anew; read the difference before you commit it
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from control_plane.app import create_app
from control_plane.cloud.connection import CloudMode
from control_plane.cloud.fake import FakeOperator, MemoryObjectStore
from control_plane.db import schema
from control_plane.db.session import Database
from control_plane.settings import Settings
from everstep.client import EverstepClient

SNAPSHOT = Path(__file__).with_name("api.json")


def document() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        settings = Settings(state_directory=Path(directory), bucket="b", mode=CloudMode.LOCAL, aws_endpoint_url="http://127.0.0.1:1")
        database = Database(settings.database)
        schema.migrate(database)
        database.close()
        app = create_app(settings, operator=FakeOperator(), objects=MemoryObjectStore(), loops=lambda *_: ())
        described: dict[str, Any] = app.openapi()
        app.state.services.database.close()
    return described


def summary(described: dict[str, Any]) -> dict[str, Any]:
    """Return operations and shapes without prose, defaults or order."""
    operations = {
        operation["operationId"]: {
            "call": f"{method.upper()} {path}",
            "parameters": sorted(parameter["name"] for parameter in operation.get("parameters", [])),
        }
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    }
    shapes = {
        name: {
            "fields": {field: _type(value) for field, value in sorted(shape.get("properties", {}).items())},
            "required": sorted(shape.get("required", [])),
        }
        for name, shape in described["components"]["schemas"].items()
        if name not in ("HTTPValidationError", "ValidationError")
    }
    return {"operations": dict(sorted(operations.items())), "shapes": dict(sorted(shapes.items()))}


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if "anyOf" in field:
        return " | ".join(_type(part) for part in field["anyOf"])
    if "enum" in field:
        return "one of " + ", ".join(field["enum"])
    if "const" in field:
        return repr(field["const"])
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    if field.get("type") == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"map to {_type(field['additionalProperties'])}"
    return field.get("format") or field.get("type", "any")


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return document()


def test_the_contract_is_what_was_promised(described):
    assert summary(described) == json.loads(SNAPSHOT.read_text()), "run python -m tests.contract.test_api if the change is meant"


def test_the_client_has_every_operation_under_its_boto3_name(described):
    operations = summary(described)["operations"]
    names = {re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in operations} - {"put_source", "describe_source"}
    missing = {name for name in names if not callable(getattr(EverstepClient, name, None))}
    assert missing == set()


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(summary(document()), indent=1) + "\n")

"""A failed read of AWS or S3 makes a request fail with a typed error, and changes no row.

The tests call every operation, and let each read of `CloudOperator` and `ServiceStore` that it makes fail in each way.
Operations, reads and errors are found by introspection, so new ones are covered. A new method of the two protocols
counts as a read until `WRITES` names it.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import import_module
from itertools import islice
from textwrap import dedent
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, EventStreamError
from sqlalchemy import select
from urllib3.exceptions import ProtocolError

from control_plane.api import errors, routes
from control_plane.cloud.errors import (
    AccessDenied,
    CapacityError,
    CloudError,
    CloudUnavailable,
    EndpointRefused,
    RegionUnknown,
    ResourceContended,
    Throttled,
)
from control_plane.cloud.objects import ServiceStore
from control_plane.cloud.operator import CloudOperator
from control_plane.contract.names import python_name
from control_plane.db.models import Base
from tests.contract.test_api import MODEL, calls, reference
from tests.unit.control_plane.api.test_source_uploads import BODY, ID, UPLOAD
from tests.unit.control_plane.loop.test_failing_reads import ERRORS

WRITES = {
    *("put", "put_if_unchanged", "put_file", "sign_upload", "delete"),
    *("set_desired", "terminate_member", "reboot_member", "strike_member", "complete_termination", "hold_termination"),
    *(
        "set_work_tags",
        "protect_new_instances",
        "protect_members",
        "suspend_processes",
        "resume_processes",
        "put_termination_hook",
    ),
}
LAZY = {"list", "stream"}
"""Methods whose errors come with the first item."""
OF_SERVICE = (
    AccessDenied,
    CapacityError,
    CloudUnavailable,
    EndpointRefused,
    RegionUnknown,
    ResourceContended,
    Throttled,
)
"""Errors for which no caller is responsible. A caller must not conclude anything from them, and may ask again."""
TOLERANT = {
    "CreateTrainingJob": "uses the MaxSize of the group that the fleet loop stored last",
    "ExportIncident": "says in the document that S3 did not return the log",
}
NOT_OF_REQUEST = {"audit_entry", "spent_nonce", "token"}
"""Tables that every request may change."""
FURTHER: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "CompleteSource": [("CreateSource", {"SourceId": ID, "Bytes": len(BODY)}), ("CompleteSource", {"SourceId": ID})],
    "DeleteCheckpoint": [("DeleteCheckpoint", {"Step": 2, "SkipTrash": True, "Generation": 1})],
    "DeleteTrainingJob": [
        ("DeleteTrainingJob", {"DryRun": True}),
        ("DeleteTrainingJob", {"DeleteObjects": True}),
        ("UndeleteTrainingJob", {"TrainingJobName": "ended"}),
        ("DeleteTrainingJob", {"DeleteObjects": True, "SkipTrash": True}),
    ],
}
"""Requests before the one of `calls`, which read what that one does not read."""


class Injected:
    """Replaces the methods of the service's store and operator. Chosen reads fail."""

    def __init__(self, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spoil: Callable[[str, Callable[[], Any]], Any] | None = None
        self.allowed: set[tuple[type, str]] = set()
        self.failed: set[tuple[type, str]] = set()
        self.called: set[tuple[type, str]] = set()
        for protocol, real in ((ServiceStore, service.objects), (CloudOperator, service.operator)):
            for name, member in vars(protocol).items():
                if inspect.isfunction(member) and not name.startswith("_"):
                    monkeypatch.setattr(real, name, self._wrapped(protocol, name, getattr(real, name)))

    def _wrapped(self, protocol: type, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.called.add((protocol, name))
            if name in WRITES or self.spoil is None or (protocol, name) in self.allowed:
                return method(*arguments, **options)
            self.failed.add((protocol, name))
            return self.spoil(name, lambda: method(*arguments, **options))

        return call


def raising(error: Exception) -> Callable[[str, Callable[[], Any]], Any]:
    def spoil(name: str, read: Callable[[], Any]) -> Any:
        if name in LAZY:
            return late()
        raise error

    def late() -> Iterator[Any]:
        raise error
        yield

    return spoil


def cut(name: str, read: Callable[[], Any]) -> Any:
    """End every content in the middle, and every list after its first entry."""
    if name == "get":
        return read()[:-1]
    if name == "stream":
        return (chunk[:-1] for chunk in islice(read(), 1))
    return islice(read(), 1) if name == "list" else read()


def garbled(name: str, read: Callable[[], Any]) -> Any:
    """Return other bytes of the same length."""
    if name == "get":
        return bytes(len(read()))
    return (bytes(len(chunk)) for chunk in read()) if name == "stream" else read()


def rows(service: Any) -> dict[str, list[tuple[Any, ...]]]:
    with service.database.read() as session:
        return {
            table.name: [tuple(row) for row in session.execute(select(table).order_by(*table.primary_key))]
            for table in Base.metadata.sorted_tables
            if table.name not in NOT_OF_REQUEST
        }


def outcome(client: Any, name: str, arguments: dict[str, Any]) -> int:
    """Call an operation, read its whole answer, and return the status. An error has one of the modeled types."""
    try:
        answer = getattr(client, python_name(name))(**arguments)
        if "Body" in answer:
            answer["Body"].read()
        if "EventStream" in answer:
            with closing(answer["EventStream"]) as stream:
                next(iter(stream))
    except (BotoCoreError, EventStreamError, ProtocolError):
        return 500  # The service has ended its answer early, so no client takes the answer for a whole one.
    except ClientError as error:
        is_typed = error.response["Error"]["Code"] in {each.code for each in errors.MODELED}
        return int(error.response["ResponseMetadata"]["HTTPStatusCode"]) if is_typed else 0
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


def requests(world: dict[str, Any], archive: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    wanted = calls(world)
    last = ("DeleteTrainingJob", "DeleteFleet", "DeleteProjectQuota")
    for name in sorted(wanted, key=lambda name: (name in last, name.startswith("Stop"), name != "StartDrill")):
        for further, arguments in FURTHER.get(name, ()):
            yield further, {**wanted[further], **arguments}
        if name != "DeleteTrainingJob":
            yield name, {**wanted[name], **({"Body": archive} if name == "PutSource" else {})}


@pytest.mark.timeout(300)
def test_no_failed_read_of_a_request_changes_a_row(service, world, monkeypatch) -> None:
    service.operator.create_group("another")
    world["job"].checkpoint(2)
    service.objects.put(reference(UPLOAD), BODY)
    store = service.objects
    archive = next(store.get(info.reference) for info in store.list(reference("projects/default/sources/")))
    injected = Injected(service, monkeypatch)
    reached: dict[str, set[tuple[type, str]]] = {}
    impatient = Config(retries={"total_max_attempts": 1}, read_timeout=20)
    with closing(service.client(config=impatient)) as client:
        for name, arguments in requests(world, archive):
            injected.called, injected.allowed = set(), set()
            before = rows(service)
            is_read_only = MODEL["operations"][name]["http"]["method"] == "GET"
            while True:
                failed: set[tuple[type, str]] = set()
                for error in ERRORS:
                    injected.spoil, injected.failed = raising(error), set()
                    status = outcome(client, name, arguments)
                    if not injected.failed:
                        break  # The operation makes no further read, so this call has succeeded.
                    failed |= injected.failed
                    if status < 400 and name in TOLERANT:
                        break
                    assert status >= 400, (name, injected.failed, error)
                    is_of_service = isinstance(error, OF_SERVICE) or not isinstance(error, CloudError)
                    assert status >= 500 or not is_of_service, (name, injected.failed, error, status)
                assert not failed or (name in TOLERANT and status < 400) or rows(service) == before, (name, failed)
                for spoil in (cut, garbled) if failed and is_read_only else ():
                    injected.spoil = spoil
                    assert outcome(client, name, arguments), (name, spoil)
                    assert rows(service) == before, (name, spoil)
                if not failed or (status < 400 and name in TOLERANT):
                    break
                injected.allowed |= failed
            assert status < 400, (name, arguments, status)
            reached[name] = reached.get(name, set()) | injected.called
    assert {name for name, methods in reached.items() if methods} >= of_cloud(), "let `calls` or FURTHER reach it"


def of_cloud() -> set[str]:
    """Return the operations whose route uses the service's store or operator, in its module or in one it imports."""
    found = set()
    for info in pkgutil.iter_modules(routes.__path__):
        module = import_module(f"{routes.__name__}.{info.name}")
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                names = [each.value for each in getattr(decorator, "keywords", ()) if each.arg == "operation_id"]
                if names and _uses_cloud(getattr(module, node.name), set()):
                    found.add(ast.literal_eval(names[0]))
    return found & MODEL["operations"].keys()


def _uses_cloud(function: Any, seen: set[Any]) -> bool:
    if not inspect.isfunction(function) or function in seen or not function.__module__.startswith("control_plane.api"):
        return False
    seen.add(function)
    tree = ast.parse(dedent(inspect.getsource(function)))
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "services"
    }
    called = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    inner = [function.__globals__[name] for name in called if name in function.__globals__]
    return bool(attributes & {"objects", "operator", "memberships"}) or any(_uses_cloud(each, seen) for each in inner)

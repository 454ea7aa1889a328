"""A fake client for tests of the command line. It takes its answers from a table."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from botocore import xform_name
from botocore.hooks import HierarchicalEmitter

from everstep import sdk
from everstep.aws_models import DATA
from everstep.cli import main as cli
from everstep.sdk import Conveniences

PAGINATORS = json.loads((DATA / "everstep/2026-01-01/paginators-1.json").read_text())["pagination"]
FURTHER_KEYS = {xform_name(name): each.get("non_aggregate_keys", ()) for name, each in PAGINATORS.items()}
"""Members besides the list that botocore keeps when it merges pages, by operation."""


class Client(Conveniences):
    """A fake client that records its calls and takes its answers from a table.

    If an answer is an exception, the client raises it.
    """

    def __init__(self, answers: dict) -> None:
        self.answers = answers
        self.meta = SimpleNamespace(events=HierarchicalEmitter())
        self.calls: list[tuple[str, dict]] = []

    def close(self) -> None:
        pass

    def upload_source(self, **request):
        return self._call("upload_source", request)

    def follow_events(self, **request):
        return self._call("follow_events", request)

    def __getattr__(self, name: str):
        return lambda **request: self._call(name, request)

    def get_waiter(self, name: str):
        return self.answers["waiter"]

    def get_paginator(self, operation: str):
        named = {
            "list_training_jobs": "TrainingJobSummaries",
            "list_project_quotas": "Quotas",
            "list_audit_entries": "AuditEntries",
            "list_training_job_revisions": "Revisions",
        }
        items = named.get(operation, operation.removeprefix("list_").capitalize())

        def search(query: dict):
            page = self._call(operation, query)
            yield from page[items]
            if "NextToken" in page:
                yield from search({**query, "NextToken": page["NextToken"]})

        def paginate(PaginationConfig=None, **query):
            if PaginationConfig is None:
                return SimpleNamespace(search=lambda _: search(query))
            query |= {"MaxResults": PaginationConfig["PageSize"]}
            query |= {"NextToken": PaginationConfig["StartingToken"]} if PaginationConfig["StartingToken"] else {}
            found: list = []
            kept: dict = {}
            while True:
                page = self._call(operation, query)
                found += page[items]
                kept = kept or {name: page[name] for name in FURTHER_KEYS.get(operation, ()) if name in page}
                if "NextToken" not in page or len(found) >= PaginationConfig["MaxItems"]:
                    break
                query = {**query, "NextToken": page["NextToken"]}
            cut = {"NextToken": "more"} if "NextToken" in page or len(found) > PaginationConfig["MaxItems"] else {}
            return SimpleNamespace(
                build_full_result=lambda: {items: found[: PaginationConfig["MaxItems"]], **kept, **cut}
            )

        return SimpleNamespace(paginate=paginate)

    def _call(self, name: str, request: dict):
        self.calls.append((name, request))
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer(**request) if callable(answer) else answer


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a command beside a source directory `code`. Return its exit code, stdout, stderr and the client's calls."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir(exist_ok=True)

    def run(*arguments: str, **answers):
        client = Client(answers)
        monkeypatch.setattr(sdk, "client", lambda **_: client)
        monkeypatch.setattr(sys, "argv", ["everstep", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("NO_COLOR", "1")
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err, client.calls

    return run

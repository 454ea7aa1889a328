"""The alert rules and the board use metrics that the server exposes, and each alert leads to the runbook."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from control_plane.cloud.call_meter import CallMeter
from tests.tidy.test_runbook import sections
from tests.unit.control_plane.api.test_prometheus import job

__all__ = ["job"]

FILES = Path(__file__).parents[4] / "infra/terraform/modules/observability"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
BOARD: dict[str, Any] = json.loads((FILES / "board.json").read_text())
QUERIES = {
    **{rule["alert"]: rule["expr"] for rule in RULES},
    **{panel["title"]: " or ".join(target["expr"] for target in panel["targets"]) for panel in BOARD["panels"]},
}
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}
_METRIC = re.compile(r"(everstep_\w+)(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\bby \(([\w, ]+)\)")


@dataclass(frozen=True)
class Exposed:
    """The metrics of a running server: all names, and the labels of those that have a series."""

    names: set[str]
    labels: dict[str, set[str]]


@pytest.fixture
def exposed(service: Any, job: Any) -> Exposed:
    """Return the metrics of a server with a job, a fleet and nodes."""
    text = httpx.get(
        f"http://{service.address}/metrics", headers={"authorization": f"Bearer {service.admin_token}"}, timeout=30
    ).text
    registry = CollectorRegistry()
    for collector in CallMeter({}).collectors:  # The test server has no connection to AWS, so it lacks these metrics.
        registry.register(collector)
    text += generate_latest(registry).decode()
    types = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    return Exposed(
        names={name + suffix for name, kind in types for suffix in SUFFIXES.get(kind, ("",))},
        labels={
            sample.name: set(sample.labels)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        },
    )


def used(query: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each metric of a query, with the labels by which the query selects or groups its series."""
    grouped = {name.strip() for names in _GROUPING.findall(query) for name in names.split(",")}
    for name, selectors in _METRIC.findall(query):
        yield name, grouped | set(re.findall(r"(\w+)=", selectors))


def test_every_query_names_metrics_and_labels_that_the_server_exposes(exposed: Exposed) -> None:
    assert len(QUERIES) == len(RULES) + len(BOARD["panels"]), "no title comes twice"
    for title, query in QUERIES.items():
        metrics = dict(used(query))
        assert metrics, title
        assert metrics.keys() <= exposed.names, title
        for name, labels in metrics.items():
            assert labels <= exposed.labels.get(name, labels), (title, name)


def test_every_alert_and_alarm_leads_to_a_section_of_the_runbook() -> None:
    links = [rule["annotations"]["runbook"] for rule in RULES]
    assert all(link.startswith("/runbook.html#") for link in links)
    alarms = (FILES / "main.tf").read_text()
    named = re.findall(r'section\s+= "([\w-]+)"', alarms)
    assert len(named) == alarms.count("problem") - 1 > 0, "each alarm has a section"
    assert {link.partition("#")[2] for link in links} | set(named) <= sections().keys()
    assert all(rule["labels"]["severity"] in ("page", "ticket") for rule in RULES)

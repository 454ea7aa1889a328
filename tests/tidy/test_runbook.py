"""Every link from the dashboard to the runbook leads to an existing section.

The dashboard also describes every cause and status.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from control_plane.core.observed.nodes import Cause
from control_plane.core.states import SecondaryStatus

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "docs/runbook.md").read_text()
WEB = ROOT / "web/src"
PARTS = ("**It means**", "**Look at**", "**Do**")


DOCUMENTS = (
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/guides").glob("*.md")),
    ROOT / "ARCHITECTURE.md",
    ROOT / "infra/haproxy/haproxy.cfg",
    ROOT / "infra/terraform/modules/servers/variables.tf",
)
OUTSIDE_OF_THE_CONTRACT = {"/v1/session", "/v1/agents/connect", "/v1/openapi.json"}
"""Paths that docs/openapi.json does not contain: the browser's session, the agents' connection and the file itself."""
OF_JOBS, OF_THE_SERVICE = RUNBOOK.split("\n## When the service itself fails\n")


WITHOUT_DUTY = {"interrupted", "pending", "slow", "no-news"}
"""Sections about states of a job that require no action of a person."""


def sections(text: str = RUNBOOK) -> dict[str, str]:
    """Return each section of the runbook by the last part of its address, which `page_of` of web/build.py derives."""
    found = re.findall(r"^### (.+)\n((?:(?!^##).*\n?)*)", text, re.MULTILINE)
    return {heading.lower().replace(" ", "-"): text for heading, text in found}


def unknown_paths(text: str) -> set[str]:
    """Return each path below `/v1/` in a text that the API does not have."""
    known = [*json.loads((ROOT / "docs/openapi.json").read_text())["paths"], *OUTSIDE_OF_THE_CONTRACT]
    patterns = [re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))) for path in known]
    named = {path.rstrip("/.") for path in re.findall(r"/v1/[\w{][\w{}/.-]*", text)}
    return {path for path in named if not any(pattern.fullmatch(path) for pattern in patterns)}


def keys(file: str, name: str) -> set[str]:
    """Return the keys of an object in the dashboard's models."""
    body = re.search(rf"const {name}\b[^=]*= \{{\n(.*?)\n\}}", (WEB / file).read_text(), re.DOTALL)
    assert body is not None
    return set(re.findall(r"^  (\w+):", body[1], re.MULTILINE))


@pytest.mark.parametrize("section", sorted(sections()))
def test_a_section_says_what_it_means_what_to_look_at_and_what_to_do(section: str) -> None:
    text = sections()[section]
    assert [text.count(part) for part in PARTS] == [1, 1, 1]
    assert [text.index(part) for part in PARTS] == sorted(text.index(part) for part in PARTS)


def test_every_cause_has_a_section_and_words() -> None:
    causes = {cause.value for cause in Cause}
    assert causes <= sections().keys()
    assert keys("contract.ts", "causeTitles") == causes


def test_every_section_that_a_duty_names_is_there() -> None:
    table = (WEB / "words" / "duty.ts").read_text().partition("SECTIONS")[2].partition("\n}")[0]
    named = set(re.findall(r": '([\w-]+)',", table))
    assert named <= sections().keys()
    assert sections(OF_JOBS).keys() - {cause.value for cause in Cause} == named | WITHOUT_DUTY


def test_every_failure_of_the_service_that_has_a_test_has_a_section() -> None:
    """docs/operating.md names a test and a section of the runbook for each fault of the service. Both exist."""
    table = (ROOT / "docs/operating.md").read_text().partition("**Faults of the service.**")[2]
    rows = re.findall(r"^\| .+ \| `([\w/.]+)::(\w+)` \| \[.+\]\(runbook\.md#([\w-]+)\) \|$", table, re.MULTILINE)
    assert len(rows) == 12
    for file, name, section in rows:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text()
        assert section in sections()


def test_every_status_has_a_look_and_a_place() -> None:
    assert keys("words/statuses.ts", "STATUSES") == {status.value for status in SecondaryStatus}


def test_its_links_lead_to_its_own_sections_since_it_is_read_without_the_internet() -> None:
    links = re.findall(r"\]\(([^)]+)\)", RUNBOOK)
    assert links
    assert {link.removeprefix("#") for link in links} <= sections().keys()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_of_the_api_that_a_document_names_exists(document: Path) -> None:
    assert unknown_paths(document.read_text()) == set()


def test_a_path_that_the_api_lacks_is_found() -> None:
    text = "`/v1/ready`, `GET /v1/fleets/NAME`, `/v1/training-jobs/{name}/stop`, `/v1/health/ready`, /v1/"
    assert unknown_paths(text) == {"/v1/health/ready"}

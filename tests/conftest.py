"""For every test."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_randomly
from hypothesis import HealthCheck, settings

from tests.postgresql import PostgreSql
from tests.warm_parent import WarmParent


def _seed_torch(seed: int) -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


# A busy machine is no bug.
settings.register_profile("everstep", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("everstep")


def pytest_configure(config: pytest.Config) -> None:
    """Keep pytest-randomly from importing DeepSpeed, which registers a seeder with it: seconds at every start, also of
    tests without torch.
    """
    pytest_randomly.entrypoint_reseeds = [_seed_torch]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Outside of the whole matrix run so many cases of a `sampled` test, drawn anew each time; pytest-randomly prints
    the seed, and -p repeats it.
    """
    if "not full" not in config.getoption("markexpr"):
        return
    draw = random.Random(config.getoption("randomly_seed"))
    cases: dict[str, list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: item.nodeid):
        if item.get_closest_marker("sampled") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped = set[pytest.Item]()
    for some in cases.values():
        marker = some[0].get_closest_marker("sampled")
        assert marker is not None
        dropped.update(draw.sample(some, max(0, len(some) - marker.args[0])))
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=list(dropped))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what collecting has made out of the garbage collector's sight: it all stays, and every full collection would
    look through it again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def warm_parent() -> Iterator[WarmParent]:
    """Where tests that train get their ranks from."""
    with contextlib.closing(WarmParent()) as parent:
        yield parent


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSql]:
    """A PostgreSQL for all tests of this process."""
    with contextlib.closing(PostgreSql()) as server:
        yield server


@pytest.fixture
def engine() -> str:
    """Which database a test runs on, unless it asks for `BOTH_ENGINES`."""
    return "sqlite"


@pytest.fixture
def database_url(engine: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database of PostgreSQL with the newest schema; empty with SQLite, where whoever asks has a file of its own."""
    if engine == "sqlite":
        yield ""
        return
    with request.getfixturevalue("postgresql").database() as url:
        yield url


@pytest.fixture
def empty_database_url(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without tables."""
    if engine == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    with request.getfixturevalue("postgresql").database(is_migrated=False) as url:
        yield url


@pytest.fixture(scope="session", autouse=True)
def recorded_calls() -> Iterator[list[str]]:
    """Hold every call of AWS that this process makes against what AWS documents, stubbed calls too; botocore itself
    checks types only.
    """
    from botocore.client import BaseClient

    from infra.local_cloud.documented import undocumented

    wrong: list[str] = []
    make = BaseClient._make_api_call

    def checked(self: Any, operation_name: str, api_params: dict[str, Any]) -> Any:
        if self.meta.service_model.service_name != "everstep":
            wrong.extend(undocumented(self.meta.service_model.operation_model(operation_name), api_params))
        return make(self, operation_name, api_params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseClient, "_make_api_call", checked)
        yield wrong


@pytest.fixture(autouse=True)
def undocumented_calls(recorded_calls: list[str]) -> Iterator[list[str]]:
    """Fail a test during which the process asked AWS for what AWS does not document; a test that means to do so clears
    the list.
    """
    recorded_calls.clear()
    yield recorded_calls
    assert not recorded_calls, f"AWS would refuse these calls: {'; '.join(recorded_calls)}"

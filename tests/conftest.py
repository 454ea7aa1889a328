"""Fixtures and hooks for all tests."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_randomly
from hypothesis import HealthCheck, settings

from tests import programs, selection
from tests.postgresql import PostgreSql
from tests.warm_parent import WarmParent

_WARM_PARENT = pytest.StashKey[WarmParent]()


def _seed_torch(seed: int) -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


# Hypothesis sets no time limit per example, because a busy machine runs the examples slowly.
settings.register_profile("everstep", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("everstep")


def pytest_configure(config: pytest.Config) -> None:
    """Prevent pytest-randomly from importing DeepSpeed.

    DeepSpeed registers a seeder with this plugin. Its import would add seconds to every start, even of tests without
    torch.
    """
    pytest_randomly.entrypoint_reseeds = [_seed_torch]
    os.umask(0o022)  # tests check the modes of new files, which depend on the umask
    with contextlib.suppress(programs.MissingProgram):  # pg_dump must be as new as the server of the tests
        folders = [str(programs.postgresql()), *os.environ["PATH"].split(os.pathsep)]
        os.environ["PATH"] = os.pathsep.join(dict.fromkeys(folders))  # each worker inherits the path of its parent


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "run only one in N of the selected tests, drawn with the seed of pytest-randomly"
    parser.addoption("--one-in", type=int, default=1, metavar="N", help=help_text)


def pytest_report_header(config: pytest.Config) -> str | None:
    one_in, seed = config.getoption("one_in"), config.getoption("randomly_seed")
    return f"one in {one_in}, repeat: make test-rest ONE_IN={one_in} SEED={seed}" if one_in > 1 else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark the tests of the rest before pytest applies the option -m, and draw from what it selected."""
    selection.divide(items)
    yield
    if (one_in := config.getoption("one_in")) > 1:
        drawn = selection.draw(items, one_in, config.getoption("randomly_seed"))
        config.hook.pytest_deselected(items=[item for item in items if item not in drawn])
        items[:] = [item for item in items if item in drawn]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Skip a test whose program is missing, unless the variable `EVERSTEP_REQUIRE_ALL` is set."""
    report = yield
    missing = call.excinfo.value if call.excinfo is not None else None
    if isinstance(missing, programs.MissingProgram) and not os.environ.get(programs.REQUIRE_ALL):
        report.outcome, report.longrepr = "skipped", (str(item.path), None, f"{programs.MISSING}{missing}")
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failed test at once. A run that is ended before its summary has then named its failures."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        sys.stderr.write(f"\nFAILED {report.nodeid} ({report.when})\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the collected objects from garbage collection and start the process that forks ranks.

    The collected objects live until the end of the run; without `gc.freeze`, every full collection would scan them.
    """
    gc.collect()
    gc.freeze()
    items = [item for item in session.items if isinstance(item, pytest.Function)]
    if session.config.option.collectonly or not any("warm_parent" in item.fixturenames for item in items):
        return
    parent = WarmParent()
    session.config.add_cleanup(parent.close)
    # On a fresh machine, the process first compiles an operator of DeepSpeed. This can take longer than the time limit
    # of a test.
    parent.wait_until_ready()
    session.config.stash[_WARM_PARENT] = parent


@pytest.fixture(scope="session")
def warm_parent(request: pytest.FixtureRequest) -> WarmParent:
    """Return the process that forks the ranks of training tests."""
    return request.config.stash[_WARM_PARENT]


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSql]:
    """Start one PostgreSQL server for all tests of this process."""
    with contextlib.closing(PostgreSql()) as server:
        yield server


def current_umask() -> int:
    """Return this process's umask without setting it: other threads may create files meanwhile."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Umask:")), 8)


@pytest.fixture(autouse=True)
def unchanged_umask() -> Iterator[None]:
    """Fail a test that leaves another umask in this process. Later tests would create files with other access modes.

    A test that runs the `main` of a program on purpose uses the fixture `restored_umask`.
    """
    before = current_umask()
    yield
    after = current_umask()
    os.umask(before)
    assert after == before, f"the test changed the umask from {before:03o} to {after:03o}"


@pytest.fixture
def restored_umask() -> Iterator[None]:
    """Restore the process's umask, which the programs' `main` functions set."""
    before = current_umask()
    yield
    os.umask(before)


@pytest.fixture(scope="session", autouse=True)
def sqlite_without_fsync() -> Iterator[None]:
    """Make SQLite commit without waiting for the disk, because the wait takes longer than most transactions.

    Only a power failure could lose data, which no test simulates. Processes that a test starts use the normal setting.
    """
    from sqlalchemy import Connection, Engine, event

    def relax(connection: Connection) -> None:
        if connection.dialect.name == "sqlite" and connection.info.setdefault("waits_for_disk", True):
            connection.info["waits_for_disk"] = False
            assert connection.connection.dbapi_connection is not None
            connection.connection.dbapi_connection.cursor().execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "engine_connect", relax)
    yield
    event.remove(Engine, "engine_connect", relax)


@pytest.fixture(scope="session", autouse=True)
def shared_statements() -> Iterator[None]:
    """Let all databases of this process share the compiled SQL statements.

    SQLAlchemy caches them by engine and dialect object. A test with its own database would compile each statement
    again. All dialects of one class have equal settings here.
    """
    from sqlalchemy import Connection, Engine, event
    from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
    from sqlalchemy.util import LRUCache

    compiled: LRUCache[Any, Any] = LRUCache(2000)

    def share(connection: Connection) -> None:
        connection.execution_options(compiled_cache=compiled)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SQLiteDialect_pysqlite, "__hash__", lambda self: hash(type(self)))
        patch.setattr(SQLiteDialect_pysqlite, "__eq__", lambda self, other: type(self) is type(other))
        event.listen(Engine, "engine_connect", share)
        yield
        event.remove(Engine, "engine_connect", share)


@pytest.fixture
def engine() -> str:
    """Return the name of the test's database engine. A test with the mark `BOTH_ENGINES` runs once per engine."""
    return "sqlite"


@pytest.fixture
def database_url(engine: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the URL of a PostgreSQL database with the newest schema, or an empty string for SQLite.

    A test on SQLite creates its own file.
    """
    if engine == "sqlite":
        yield ""
        return
    with request.getfixturevalue("postgresql").database() as url:
        yield url


@pytest.fixture
def empty_database_url(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return the URL of a database without tables."""
    if engine == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    with request.getfixturevalue("postgresql").database(is_migrated=False) as url:
        yield url


@pytest.fixture(scope="session", autouse=True)
def shared_aws_models() -> Iterator[None]:
    """Let all botocore sessions of this process read each model of an AWS service only once.

    Each session would parse its own copy, which takes longer than most tests. Sessions with different `AWS_DATA_PATH`
    share nothing.
    """
    import botocore.session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield


@pytest.fixture(scope="session", autouse=True)
def recorded_calls() -> Iterator[list[str]]:
    """Check every AWS call of this process, stubbed calls included, against the AWS documentation.

    botocore itself checks only types.
    """
    from botocore.client import BaseClient

    from infra.local_cloud.documented import violations

    wrong: list[str] = []
    make = BaseClient._make_api_call

    def checked(self: Any, operation_name: str, api_params: dict[str, Any]) -> Any:
        if self.meta.service_model.service_name != "everstep":
            operation = self.meta.service_model.operation_model(operation_name)
            wrong.extend(f"{operation_name}: {each.words}" for each in violations(operation, api_params))
        return make(self, operation_name, api_params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseClient, "_make_api_call", checked)
        yield wrong


@pytest.fixture(autouse=True)
def undocumented_calls(recorded_calls: list[str]) -> Iterator[list[str]]:
    """Fail a test whose process sent AWS an undocumented request.

    A test that sends such a request on purpose clears the list.
    """
    recorded_calls.clear()
    yield recorded_calls
    assert not recorded_calls, f"AWS would refuse these calls: {'; '.join(recorded_calls)}"

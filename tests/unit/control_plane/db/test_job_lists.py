"""Tests lists of jobs: filters, sort orders, consecutive pages, and how much the database computes for one page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import event, insert, select, text

from control_plane.core.states import TrainingJobStatus, training_job_status
from control_plane.db import job_lists, jobs
from control_plane.db.job_lists import JobFilter, SortBy
from control_plane.db.models import JobRow
from control_plane.db.session import Database
from tests import sqlite
from tests.unit.control_plane.db.conftest import NOW, new_job, spec

MANY = 10_000
PAGE = 100


@pytest.mark.parametrize("sort_by", SortBy)
@pytest.mark.parametrize("is_ascending", [False, True])
def test_pages_meet_without_gap_or_overlap(database, sort_by, is_ascending):
    with database.write() as session:
        for number in range(7):
            # groups of three consecutive jobs have the same creation time
            jobs.create(session, new_job(f"job{number}"), NOW + timedelta(seconds=number // 3))
    seen: list[str] = []
    after = None
    while True:
        with database.read() as session:
            page = job_lists.page(
                session, JobFilter(), after=after, limit=2, sort_by=sort_by, is_ascending=is_ascending
            )
        if not page:
            break
        seen += [job.name for job in page]
        after = job_lists.position_of(page[-1], sort_by)
    expected = [f"job{number}" for number in range(7)]
    assert seen == (expected if is_ascending else expected[::-1])


def test_a_job_that_is_deleted_between_two_pages_leaves_no_hole(database):
    with database.write() as session:
        for number in range(5):
            jobs.create(session, new_job(f"job{number}"), NOW + timedelta(seconds=number))
    with database.read() as session:
        first = job_lists.page(session, JobFilter(), limit=2)
    with database.write() as session:
        session.execute(text("UPDATE job SET ended_at = created_at"))
        jobs.remove(session, first[-1].run_id)
    with database.read() as session:
        rest = job_lists.page(
            session, JobFilter(), after=job_lists.position_of(first[-1], SortBy.CREATION_TIME), limit=9
        )
    assert [job.name for job in rest] == ["job2", "job1", "job0"]


@pytest.mark.parametrize(
    ("which", "names"),
    [
        (JobFilter(name_contains="_"), []),  # the filter treats wildcards of SQL as ordinary characters
        (JobFilter(project="p"), ["c"]),
        (JobFilter(fleet_name="other"), ["a"]),
        (JobFilter(created_after=NOW), ["c", "b"]),
        (JobFilter(created_before=NOW + timedelta(seconds=1)), ["a"]),
        (JobFilter(created_after=NOW, created_before=NOW + timedelta(seconds=2)), ["b"]),
        (JobFilter(modified_after=NOW + timedelta(seconds=3)), ["a"]),
        (JobFilter(modified_before=NOW + timedelta(seconds=2)), ["b"]),
        (JobFilter(tag_key="team"), ["c", "b", "a"]),
        (JobFilter(tag_key="team", tag_value="b"), ["b"]),
        (JobFilter(tag_key="a.b c$[0]", tag_value="x"), ["c"]),
        (JobFilter(tag_key="none"), []),
        (JobFilter(tag_key="team", tag_value="a", fleet_name="other"), ["a"]),
    ],
)
def test_filters(database, which, names):
    with database.write() as session:
        jobs.create(session, new_job("a", fleet_name="other"), NOW)
        jobs.create(session, new_job("b", tags={"team": "b"}), NOW + timedelta(seconds=1))
        jobs.create(
            session, new_job("c", project="p", tags={"team": "a", "a.b c$[0]": "x"}), NOW + timedelta(seconds=2)
        )
        jobs.request_stop(session, jobs.get(session, "a").run_id, NOW + timedelta(seconds=9))
    with database.read() as session:
        assert [job.name for job in job_lists.page(session, which, limit=10)] == names


def test_a_status_lists_what_shows_it(database):
    """The status filter uses the status that the API shows for each job.

    The test covers every state, with and without a stop request.
    """
    shown: dict[str, TrainingJobStatus] = {}
    with database.write() as session:
        for state in ("queued", "running", "pausing", "stopping", "completed", "failed", "stopped"):
            for is_asked in (False, True):
                name = f"{state}-{int(is_asked)}"
                jobs.create(session, new_job(name, state=state), NOW)
                if is_asked:
                    jobs.request_stop(session, jobs.get(session, name).run_id, NOW)
                shown[name] = training_job_status(state, is_stop_requested=is_asked)
        session.execute(text("UPDATE job SET ended_at = created_at WHERE state IN ('completed', 'failed', 'stopped')"))
    for status in TrainingJobStatus:
        with database.read() as session:
            listed = {job.name for job in job_lists.page(session, JobFilter(status=status), limit=100)}
        assert listed == {name for name, seen in shown.items() if seen is status}, status


# How much the database computes for one page


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Iterator[Database]:
    """Yield a database of ten thousand jobs, one percent of which are running."""
    directory: Path = tmp_path_factory.mktemp("large")
    made = sqlite.migrated(directory / "large.db")
    template = {"tags": {}, "spec": asdict(spec()), "reason": "", "transitions": [], "lease_counter": 0}
    rows = [
        {
            **template,
            "run_id": f"{number:032d}",
            "name": f"job-{number:05d}",
            "fleet_name": f"fleet-{number % 3}",
            "project": f"project-{number % 5}",
            "state": "running" if number % 100 == 0 else "completed",
            "created_at": NOW + timedelta(seconds=number // 2),
            "modified_at": NOW + timedelta(seconds=number),
            "ended_at": None if number % 100 == 0 else NOW + timedelta(seconds=number + 5),
        }
        for number in range(MANY)
    ]
    with made.write() as session:
        session.execute(insert(JobRow), rows)
    yield made
    made.close()


class Effort:
    """Counts the instructions of SQLite's virtual machine, in hundreds."""

    def __init__(self, database: Database) -> None:
        self.hundreds = 0
        self.statements: list[tuple[str, object]] = []
        event.listen(database.engine, "before_cursor_execute", self._note)
        self._database = database

    def _note(self, connection, cursor, statement, parameters, context, executemany):
        self.statements.append((statement, parameters))

    def of(self, which: JobFilter, **options) -> tuple[int, tuple]:
        with self._database.read() as session:
            raw = session.connection().connection.driver_connection
            count = 0

            def tick() -> int:
                nonlocal count
                count += 1
                return 0

            raw.set_progress_handler(tick, 100)
            try:
                found = job_lists.page(session, which, limit=PAGE, **options)
            finally:
                raw.set_progress_handler(None, 0)
        return count, found

    def plan_of_last(self) -> str:
        statement, parameters = next((s, p) for s, p in reversed(self.statements) if s.startswith("SELECT"))
        with self._database.engine.connect() as connection:
            rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            return "; ".join(str(row[3]) for row in rows)


@pytest.mark.parametrize("sort_by", SortBy)
@pytest.mark.parametrize("is_ascending", [False, True])
@pytest.mark.parametrize(
    "which",
    [
        JobFilter(),
        JobFilter(project="project-3"),
        JobFilter(fleet_name="fleet-1"),
        JobFilter(status=TrainingJobStatus.COMPLETED),
        JobFilter(status=TrainingJobStatus.COMPLETED, project="project-3"),
    ],
)
def test_the_last_page_costs_what_the_first_does(large, which, sort_by, is_ascending):
    effort = Effort(large)
    first, page = effort.of(which, sort_by=sort_by, is_ascending=is_ascending)
    assert len(page) == PAGE
    assert "TEMP B-TREE" not in effort.plan_of_last()
    options = {"sort_by": sort_by, "is_ascending": is_ascending}
    with large.read() as session:
        columns = select(JobRow.name, JobRow.created_at, JobRow.modified_at, JobRow.run_id)
        if which.status is TrainingJobStatus.COMPLETED:
            columns = columns.where(JobRow.state == "completed")
        if which.project is not None:
            columns = columns.where(JobRow.project == which.project)
        if which.fleet_name is not None:
            columns = columns.where(JobRow.fleet_name == which.fleet_name)
        every = sorted(
            session.execute(columns).all(),
            key=lambda row: job_lists.position_of(row, sort_by),
            reverse=not is_ascending,
        )
    deep = job_lists.position_of(every[len(every) - PAGE - 1], sort_by)
    last, page = effort.of(which, after=deep, **options)
    assert [job.name for job in page] == [row.name for row in every[-PAGE:]]
    plan = effort.plan_of_last()
    assert "SEARCH job USING INDEX" in plan, plan
    assert "TEMP B-TREE" not in plan, plan
    assert last <= 2 * first + 10, "the jobs before the page are not looked at"


def test_the_few_that_go_on_are_found_among_the_many_that_have_ended(large):
    effort = Effort(large)
    spent, page = effort.of(JobFilter(status=TrainingJobStatus.IN_PROGRESS))
    everything, _ = effort.of(JobFilter())
    assert len(page) == MANY // 100
    assert spent <= 2 * everything + 10

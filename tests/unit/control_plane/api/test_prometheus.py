"""Tests the metrics of a server that Prometheus scrapes."""

from __future__ import annotations

from datetime import timedelta

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from control_plane.db import events, exports, incidents, jobs, protection
from control_plane.db.events import NewEvent
from control_plane.db.leases import Leaser
from control_plane.db.tokens import Role
from tests.unit.control_plane.api.conftest import START
from tests.unit.control_plane.api.test_results import Job, shard

OF_JOB = {"job": "gpt", "project": "default", "fleet": "main"}


@pytest.fixture
def job(service, client, fleet, source):
    """Return a training job with one recovered incident and one open incident."""
    job = Job(service, client, source)
    job.connect("i-0", "i-1")
    job.launch(1)
    job.write(jobs.transition, before="queued", after="running", now=START, reason="trains", started_at=START)
    job.write(
        jobs.change,
        boundary=12,
        committed_step=10,
        accounting={"train": 90_000_000, "queue": 7_000_000, "restore": 10_000_000},
        cost_usd=1.5,
    )
    job.write(protection.record, [shard(0, True, True), shard(1, True, False)], START)
    job.open_incident("inc-1")
    over = {"closed_at": START + timedelta(seconds=9), "restore_source": "peer", "lost_steps": 2}
    job.write(
        incidents.change,
        "inc-1",
        **over,
        detect_seconds=0.5,
        replace_seconds=1.0,
        restore_seconds=2.0,
        rework_seconds=0.25,
    )
    job.open_incident("inc-2", 1)
    return job


def scrape(service, token: str | None = None) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = httpx.get(
        f"http://{service.address}/metrics",
        headers={"authorization": f"Bearer {token or service.admin_token}"},
        timeout=30,
    )
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples), "no series comes twice"
    return found


def of(found, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_a_job_is_told(service, job):
    found = scrape(service)
    assert of(found, "everstep_jobs", status="Training") == 1
    assert of(found, "everstep_job_step", **OF_JOB) == 12
    assert of(found, "everstep_job_committed_step", **OF_JOB) == 10
    assert of(found, "everstep_job_ettr_ratio", **OF_JOB) == pytest.approx(0.9)
    assert of(found, "everstep_job_seconds_total", **OF_JOB, bucket="queue") == 7
    assert of(found, "everstep_job_cost_usd_total", **OF_JOB) == 1.5
    assert of(found, "everstep_job_degraded_shards", **OF_JOB) == 1
    assert of(found, "everstep_job_replica_lag_steps", **OF_JOB) == 3


def test_lists_of_jobs_have_the_same_figures(client, job):
    (line,) = client.list_training_jobs()["TrainingJobSummaries"]
    assert (line["EttrRatio"], line["CostUsd"]) == (pytest.approx(0.9), 1.5)


def test_recoveries_are_counted_when_they_are_over(service, job):
    found = scrape(service)
    these = {"job": "gpt", "project": "default", "cause": "instance_terminated", "source": "peer"}
    assert of(found, "everstep_job_recoveries_total", **these) == 1
    assert of(found, "everstep_job_lost_steps_total", **these) == 2


def test_what_the_loops_have_counted_is_told_from_nothing_on(service):
    before = scrape(service)
    for loop in ("job", "fleet"):
        assert of(before, "everstep_reconcile_seconds_count", loop=loop) == 0
        assert of(before, "everstep_reconcile_stale_applies_total", loop=loop) == 0
        assert of(before, "everstep_lease_lost_total", kind=loop) == 0
    figures = service.services.loop_metrics
    figures.reconciled("job", 0.02)
    figures.was_stale("job")
    figures.lost_lease("fleet")
    figures.recovered({"detect_seconds": 0.5, "replace_seconds": 1.0, "restore_seconds": 2.0, "rework_seconds": 4000.0})
    found = scrape(service)
    assert [of(found, "everstep_reconcile_seconds_bucket", loop="job", le=le) for le in ("0.01", "0.025", "+Inf")] == [
        0,
        1,
        1,
    ]
    assert of(found, "everstep_reconcile_stale_applies_total", loop="job") == 1
    assert of(found, "everstep_lease_lost_total", kind="fleet") == 1
    assert [of(found, "everstep_recovery_phase_seconds_bucket", phase="restore", le=le) for le in ("1.0", "2.5")] == [
        0,
        1,
    ]
    assert [
        of(found, "everstep_recovery_phase_seconds_bucket", phase="rework", le=le) for le in ("1800.0", "+Inf")
    ] == [0, 1]
    assert of(found, "everstep_recovery_phase_seconds_sum", phase="detect") == 0.5
    assert found.keys() == before.keys(), "no series is added as time goes by"
    assert not any(name.endswith("_created") for name, _ in found)


def test_a_fleet_is_told(service, job):
    found = scrape(service)
    assert of(found, "everstep_nodes", fleet="main", state="joining") == 2
    assert of(found, "everstep_agents_connected", fleet="main") == 0
    assert of(found, "everstep_fleet_frozen", fleet="main") == 0


def test_a_token_of_another_project_sees_none_of_its_jobs(service, job):
    names = {name for name, _ in scrape(service, service.token(Role.VIEWER, "other"))}
    assert not any(name.startswith(("everstep_job_", "everstep_recovery_")) for name in names)


def test_nobody_scrapes_without_a_token(service):
    assert httpx.get(f"http://{service.address}/metrics", timeout=30).status_code == 401


def test_exports_show_how_far_behind_they_are_and_whether_they_fail(service, job):
    with service.database.write() as session:
        exports.ensure(session, "arn:a")
    with service.database.write() as session:
        for number in range(3):
            events.append(session, NewEvent(at=START, type="T", message=str(number)))
        lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "export", "arn:a")
        exports.change(session, lease, failing_since=START, failure="refused")
    found = scrape(service)
    of_export = frozenset({("export", "arn:a")})
    assert (found["everstep_export_lag_events", of_export], found["everstep_export_failing", of_export]) == (3, 1)

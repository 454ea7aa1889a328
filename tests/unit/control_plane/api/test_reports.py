"""Tests GetReport: the sums over a time range, trends, and that no project sees figures of another project."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from datetime import timedelta
from itertools import islice

import pytest
from sqlalchemy import insert, select

from control_plane.core.ledger_hours import HOUR, Ledger
from control_plane.db import fleets, incidents, jobs, ledger_hours, models
from control_plane.db.leases import Leaser
from control_plane.db.reports import MOST_INCIDENTS
from control_plane.db.tokens import Role
from tests.postgresql import BOTH_ENGINES
from tests.unit.control_plane.api.conftest import START, refused
from tests.unit.control_plane.api.test_results import Job

pytestmark = pytest.mark.parametrize("engine", BOTH_ENGINES)

SECOND = 1_000_000
NOON = int(START.timestamp()) * SECOND


class Charged(Job):
    """A job whose accumulated times and costs the tests store hour by hour, from its creation at a full hour."""

    def __init__(self, service, client, source, **request) -> None:
        self.created = service.clock()
        super().__init__(service, client, source, **request)

    def charge(self, hours: int, spent: dict[str, int], node_hours: int, cost_usd: float | None) -> None:
        """Store the times and costs that the job has accumulated `hours` hours after its creation.

        Args:
            hours: hours since the job's creation, the sum of all times in `spent`.
            spent: seconds in each bucket of the job's time, such as `train`.
            node_hours: hours of all nodes together.
            cost_usd: the cost of these node hours; None if the fleet has no price.
        """
        in_micro = {name: amount * SECOND for name, amount in spent.items()}
        assert sum(in_micro.values()) == hours * HOUR
        until = self.created + timedelta(hours=hours)
        ledger = Ledger(at=int(until.timestamp()) * SECOND, spent=in_micro, node_microseconds=node_hours * HOUR)
        self.write(ledger_hours.record_job, [ledger])
        self.write(
            jobs.change,
            accounting=in_micro,
            accounted_until=until,
            node_microseconds=node_hours * HOUR,
            cost_usd=cost_usd,
            started_at=START,
        )

    def fail(self, incident_id: str, cause: str, at: timedelta, seconds: int, cost_usd: float) -> None:
        """Store a closed incident.

        Its last phase is rework, the repetition of lost steps. It ends `seconds` after the failure.
        """
        self.open_incident(incident_id)
        self.write(
            incidents.change,
            incident_id,
            cause=cause,
            failed_at=START + at,
            closed_at=START + at + timedelta(seconds=seconds),
            detect_seconds=1.0,
            replace_seconds=0.0,
            restore_seconds=0.0,
            rework_seconds=seconds - 1.0,
            lost_steps=5,
            cost_usd=cost_usd,
        )


def charge_spares(service, hours: int, spare_hours: int) -> None:
    """Store the time that spares of the fleet have accumulated `hours` hours after noon.

    `spare_hours` is the time of all spares together: two spares accumulate two hours per hour.
    """
    spent = {"spare": spare_hours * HOUR}
    with service.database.write() as session:
        lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "fleet", "main")
        ledger_hours.record_fleet(session, lease, [Ledger(at=NOON + hours * HOUR, spent=spent)])
        fleets.change(session, lease, idle_microseconds=spent, idle_until=START + timedelta(hours=hours))


@pytest.fixture
def job(service, client, fleet, source):
    client.update_fleet(FleetName="main", PriceUsdPerHour=10.0)
    return Charged(service, client, source, RanksPerNode=8)


@pytest.fixture
def trained(service, job):
    """Return a job that trained for three hours on two nodes, with one failure and one drill.

    Its fleet also has one spare.
    """
    job.charge(1, {"queue": 600, "train": 3000}, 2, 20.0)
    charge_spares(service, 1, 1)
    job.charge(2, {"queue": 600, "train": 6000, "detect": 100, "rework": 500}, 4, 40.0)
    charge_spares(service, 2, 2)
    job.charge(3, {"queue": 600, "train": 9540, "detect": 160, "rework": 500}, 6, 60.0)
    charge_spares(service, 3, 3)
    job.fail("inc-1", "hang", timedelta(minutes=90), 600, 3.0)
    job.fail("inc-2", "drill", timedelta(minutes=150), 60, 0.3)
    service.clock.advance(3 * 3600)
    return job


@pytest.mark.covers("GetReport.StartTime", "GetReport.EndTime", "GetReport.Period")
def test_a_report_has_totals_and_a_trend(client, trained):
    report = client.get_report(StartTime=START, EndTime=START + timedelta(hours=3), Period="Hour")
    assert (report["StartTime"], report["EndTime"]) == (START, START + timedelta(hours=3))
    assert [bucket["StartTime"] for bucket in report["Buckets"]] == [START + timedelta(hours=n) for n in range(3)]
    figures = [bucket["Figures"] for bucket in report["Buckets"]]
    assert [each["ProductiveSeconds"] for each in figures] == [3000, 3000, 3540]
    assert [each["EttrRatio"] for each in figures] == [1.0, 3000 / 3600, 3540 / 3600]
    assert [each["CostUsd"] for each in figures] == [20.0, 20.0, 20.0]
    assert [each["SpareCostUsd"] for each in figures] == [10.0, 10.0, 10.0]
    assert [each["Failures"]["Count"] for each in figures] == [0, 1, 0]
    assert [each["Drills"]["Count"] for each in figures] == [0, 0, 1]
    total = report["Total"]
    assert (total["NodeSeconds"], total["RankSeconds"]) == (6 * 3600, 48 * 3600)
    assert total["IdleNodeSeconds"] == {"spare": 3 * 3600}
    assert total["Failures"] == {
        "Count": 1,
        "RecoveredCount": 1,
        "RecoverySeconds": 600,
        "RecomputedSteps": 5,
        "CostUsd": 3.0,
    }
    assert (total["MttfSeconds"], total["MttrSeconds"]) == (9540, 600)
    assert [(each["Cause"], each["Kind"], each["Incidents"]["Count"]) for each in report["Causes"]] == [
        ("drill", "Drill", 1),
        ("hang", "Failure", 1),
    ]
    part = client.get_report(StartTime=START + timedelta(hours=1), EndTime=START + timedelta(hours=2))
    assert part["Total"] == figures[1]
    assert [each["Figures"]["ProductiveSeconds"] for each in part["Buckets"]] == [3000]


def test_a_report_over_the_life_of_a_job_agrees_with_its_description(client, trained):
    (figures,) = (each["Figures"] for each in client.get_report()["Jobs"])
    described = client.describe_training_job(TrainingJobName="gpt")
    reliability = described["Reliability"]
    assert figures["AccountingSeconds"] == described["AccountingSeconds"]
    assert figures["NodeSeconds"] == described["NodeSeconds"]
    assert figures["CostUsd"] == described["CostUsd"] == 60.0
    for name in ("EttrRatio", "EttrWithQueueRatio"):
        assert figures[name] == reliability[name]
    assert (figures["MttfSeconds"], figures["MttrSeconds"]) == (reliability["MttfSeconds"], reliability["MttrSeconds"])
    incidents_of = [figures[kind] for kind in ("Failures", "PlannedStops", "Drills")]
    assert sum(each["RecomputedSteps"] for each in incidents_of) == reliability["LostSteps"]
    assert sum(each.get("CostUsd", 0) for each in incidents_of) == pytest.approx(reliability["IncidentCostUsd"])
    assert sum(each["Count"] for each in incidents_of) == described["IncidentCount"]


def test_the_default_range_ends_now_and_has_seven_days(client, job, service):
    report = client.get_report()
    assert (report["StartTime"], report["EndTime"]) == (START - timedelta(days=7), START)
    assert [bucket["StartTime"].hour for bucket in report["Buckets"]] == [12, *[0] * 7]
    assert (report["JobCount"], report["Jobs"], report["Projects"], report["Causes"]) == (0, [], [], [])
    assert "OtherJobs" not in report
    assert "EttrRatio" not in report["Total"]
    service.clock.advance(1)
    assert client.get_report()["EndTime"] == START + timedelta(hours=1)
    assert [job["TrainingJobName"] for job in client.get_report()["Jobs"]] == ["gpt"]


@pytest.mark.covers("GetReport.Project", "GetReport.FleetName", "GetReport.MaxJobs")
def test_a_report_is_restricted_to_a_project_and_to_a_fleet(client, service, trained, source):
    with closing(service.client(service.token(Role.SUBMITTER, "speech"))) as owner:
        theirs = owner.upload_source(Directory=source_directory(service))
        other = Charged(service, owner, theirs, TrainingJobName="asr")
        service.clock.advance(3600)
        other.charge(1, {"train": 3600}, 1, 100.0)
        report = client.get_report()
        assert [(each["Project"], each["Figures"]["CostUsd"]) for each in report["Projects"]] == [
            ("speech", 100.0),
            ("default", 60.0),
        ]
        top = client.get_report(MaxJobs=1)
        assert [each["TrainingJobName"] for each in top["Jobs"]] == ["asr"]
        assert (top["JobCount"], top["OtherJobs"]["CostUsd"], top["Total"]["CostUsd"]) == (2, 60.0, 160.0)
        only = client.get_report(Project="speech")
        assert (only["Total"]["CostUsd"], only["JobCount"]) == (100.0, 1)
        assert only["Fleets"][0]["Figures"]["IdleNodeSeconds"] == {}, "the fleet belongs to another project"
        own = owner.get_report()
        assert [each["TrainingJobName"] for each in own["Jobs"]] == ["asr"]
        assert (own["Causes"], own["Total"]["Drills"]["Count"]) == ([], 0)
        assert owner.get_report(Project="default")["JobCount"] == 0
    assert client.get_report(FleetName="main")["Total"] == report["Total"]
    assert client.get_report(FleetName="other")["Total"]["NodeSeconds"] == 0


def source_directory(service):
    directory = service.settings.state_directory.parent / "theirs"
    directory.mkdir()
    (directory / "train.py").write_text("print('theirs')\n")
    return directory


def test_an_invalid_range_is_refused(client, job, monkeypatch):
    with refused("ValidationException", "EndTime must be after StartTime"):
        client.get_report(StartTime=START, EndTime=START)
    with refused("ValidationException", r"Period gives 801 buckets; at most 800 are possible"):
        client.get_report(StartTime=START, EndTime=START + timedelta(hours=801), Period="Hour")
    with refused("ValidationException", "StartTime must be at most 5600 days before EndTime"):
        client.get_report(StartTime=START - timedelta(days=5601), EndTime=START)
    with refused("ValidationException", "MaxJobs"):
        client.get_report(MaxJobs=101)


def store_copies(service, table, changes: Iterable[dict[str, str]]) -> None:
    """Store one copy of a table's first row for each set of changed columns."""
    with service.database.write() as session:
        row = dict(session.execute(select(table)).mappings().first())
        session.execute(insert(table), [row | changed for changed in changes])


def test_a_report_over_too_many_incidents_is_refused(client, service, trained):
    store_copies(service, models.IncidentRow.__table__, ({"id": f"copy-{n}"} for n in range(MOST_INCIDENTS - 1)))
    with refused("ValidationException", "20,001 incidents, which is too much for one report") as caught:
        client.get_report()
    assert "shorter time range" in caught.value.hint


def test_a_report_over_too_many_rows_is_refused(client, service, trained):
    names = ({"run_id": f"{n:032x}", "name": f"gpt-{n}", "request_token": f"{n}"} for n in range(62))
    asked = {"StartTime": START - timedelta(hours=797), "EndTime": START + timedelta(hours=3), "Period": "Hour"}
    store_copies(service, models.JobRow.__table__, islice(names, 61))
    assert client.get_report(**asked)["JobCount"] == 62
    store_copies(service, models.JobRow.__table__, names)
    with refused("ValidationException", "63 jobs in 800 buckets"):
        client.get_report(**asked)

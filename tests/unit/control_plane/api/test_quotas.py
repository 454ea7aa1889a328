from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial

import pytest

from control_plane.db.tokens import Role
from tests.postgresql import BOTH_ENGINES
from tests.unit.control_plane.api.conftest import refused, without_metadata
from tests.unit.control_plane.api.test_sources import archive

pytestmark = pytest.mark.parametrize("engine", BOTH_ENGINES)


@pytest.fixture
def wanted(fleet, source):
    return {"Source": source, "EntryPoint": "train.py", "NodeCount": 4, "Project": "speech"}


@pytest.mark.covers(
    "DeleteProjectQuota.Project",
    "PutProjectQuota.Project",
    "PutProjectQuota.MaxNodeCount",
    "ListProjectQuotas.MaxResults",
    "ListProjectQuotas.NextToken",
)
def test_a_quota_is_put_listed_and_lifted(service, client, fleet):
    assert client.list_project_quotas()["Quotas"] == []
    put = without_metadata(client.put_project_quota(Project="speech", MaxNodeCount=4, MaxJobCount=2))
    none = {"MaxPriority": 0, "AllowedRoleArns": [], "AllowedSecrets": [], "AllowedData": []}
    assert put == {"Project": "speech", "MaxNodeCount": 4, "MaxJobCount": 2, **none}
    client.put_project_quota(Project="speech", MaxNodeCount=4, MaxJobCount=2)
    client.put_project_quota(Project="vision", MaxJobCount=1)
    assert client.list_project_quotas()["Quotas"] == [put, {"Project": "vision", "MaxJobCount": 1, **none}]
    first = client.list_project_quotas(MaxResults=1)
    assert first["Quotas"] == [put]
    last = client.list_project_quotas(MaxResults=1, NextToken=first["NextToken"])
    assert ([quota["Project"] for quota in last["Quotas"]], "NextToken" in last) == (["vision"], False)
    with closing(service.client(service.token(Role.SUBMITTER, "vision"))) as member:
        assert [quota["Project"] for quota in member.list_project_quotas()["Quotas"]] == ["vision"]
        with refused("AccessDeniedException"):
            member.put_project_quota(Project="vision")
        with refused("AccessDeniedException"):
            member.delete_project_quota(Project="vision")
    assert without_metadata(client.delete_project_quota(Project="speech")) == put
    with refused("ResourceNotFoundException"):
        client.delete_project_quota(Project="speech")
    assert [event["Type"] for event in client.list_events()["Events"]].count("QuotaSet") == 2


@pytest.mark.covers("PutProjectQuota.MaxNodeCount")
def test_a_job_that_could_never_run_is_refused(client, wanted):
    client.put_project_quota(Project="speech", MaxNodeCount=3)
    with refused(
        "ValidationException", match="NodeCount: NodeCount is 4; jobs of the project speech may hold 3 nodes of a fleet"
    ):
        client.create_training_job(TrainingJobName="a", **wanted)
    client.create_training_job(TrainingJobName="a", **{**wanted, "Project": "vision"})


@pytest.mark.covers("PutProjectQuota.MaxJobCount")
def test_no_more_jobs_than_its_quota_are_under_way(client, wanted):
    client.put_project_quota(Project="speech", MaxJobCount=1)
    client.create_training_job(TrainingJobName="a", **wanted)
    with refused("ConflictException", match="'speech' has 1 unfinished training jobs; its quota is 1"):
        client.create_training_job(TrainingJobName="b", **wanted)
    client.create_training_job(TrainingJobName="b", **{**wanted, "Project": "vision"})


@pytest.mark.parametrize("names", ["ab", "aa"])
def test_of_jobs_that_come_at_once_as_many_are_taken_as_have_room(
    service, client, wanted, names: str, monkeypatch
) -> None:
    """Requests that arrive at the same time cannot exceed a quota together.

    All of them pass their checks before any of them is stored. Even without a quota, only one job can have a given
    name.
    """
    if len(set(names)) > 1:
        client.put_project_quota(Project="speech", MaxJobCount=1)
    database = service.services.database
    write, all_checked = database.write, threading.Barrier(len(names))

    def write_together():
        all_checked.wait(10)
        return write()

    monkeypatch.setattr(database, "write", write_together)

    def create(number: int) -> str:
        try:
            client.create_training_job(TrainingJobName=names[number], **{**wanted, "Priority": number})
        except client.exceptions.ConflictException as error:
            return str(error)
        return "created"

    with ThreadPoolExecutor(len(names)) as threads:
        told = list(threads.map(create, range(len(names))))
    assert told.count("created") == 1, told
    assert len(client.list_training_jobs()["TrainingJobSummaries"]) == 1


def test_the_plan_says_that_a_job_waits_for_its_quota(service, client, wanted):
    client.put_project_quota(Project="speech", MaxNodeCount=6)
    client.create_training_job(TrainingJobName="a", **wanted)
    # Give the jobs different ages. Between jobs of the same age, the random run id would decide.
    service.clock.advance(1)
    plan = client.create_training_job(TrainingJobName="b", **wanted, DryRun=True)["Plan"]
    assert (
        plan["WaitsFor"] == "waits for its project's quota: speech has a quota of 6 nodes of this fleet and holds 4, "
        "the job needs 4 nodes"
    )
    assert not plan["CanStartNow"]
    other = client.create_training_job(TrainingJobName="b", **{**wanted, "Project": "vision"}, DryRun=True)["Plan"]
    assert "QueuePosition" not in other


@pytest.mark.security
@pytest.mark.covers("PutProjectQuota.MaxSourceBytes")
def test_sources_of_a_project_fill_its_quota_and_no_more(service, client):
    """An archive counts against the quota as soon as its upload is announced.

    Otherwise, a submitter could fill the bucket with uploads that never complete.
    """
    body = archive(("train.py", b"print(1)"))
    first, second = hashlib.sha256(body).hexdigest(), "1" * 64
    client.put_project_quota(Project="speech", MaxSourceBytes=len(body) + 100)
    with closing(service.client(service.token(Role.SUBMITTER, "speech"))) as member:
        member.create_source(SourceId=second, Bytes=101)
        told = f"'speech' uses 101 of {len(body) + 100} bytes for sources; this archive needs {len(body)}"
        for upload in (partial(member.create_source, Bytes=len(body)), partial(member.put_source, Body=body)):
            with refused("ConflictException", match=told) as caught:
                upload(SourceId=first)
            assert "--max-source-bytes" in caught.value.hint
        # the second announcement of the same archive replaces the first one
        member.create_source(SourceId=second, Bytes=100)
        for _ in range(2):
            member.put_source(SourceId=first, Body=body)
        with refused("ConflictException", match=f"uses {len(body) + 100} of"):
            member.create_source(SourceId="2" * 64, Bytes=101)
        service.clock.advance(27 * 3600)
        member.create_source(SourceId="2" * 64, Bytes=100)
    client.put_source(SourceId=first, Body=body)  # this project has no quota


@pytest.mark.security
def test_an_archive_that_is_refused_takes_no_room(service, client):
    bad, good = archive(("../evil.py", b"x" * 50)), archive(("train.py", b"print(1)"))
    client.put_project_quota(Project="default", MaxSourceBytes=len(good))
    for body, error in ((bad, "ValidationException"), (good, None)):
        with refused(error) if error else nullcontext():
            client.put_source(SourceId=hashlib.sha256(body).hexdigest(), Body=body)

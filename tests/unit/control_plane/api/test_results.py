"""The API describes a job: its logs, outputs, protection, checkpoints, incidents and metrics.

The tests store the data in the form in which the loops and agents store it.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from contextlib import closing
from datetime import timedelta

import httpx
import msgspec
import pytest
from botocore.exceptions import WaiterError

from control_plane.api.caller_threads import OPEN_DOWNLOADS
from control_plane.core import domain_loss
from control_plane.core.observed.facts import Recorded
from control_plane.core.observed.incidents import IncidentRecord as OpenIncident
from control_plane.core.observed.jobs import Memo
from control_plane.core.observed.nodes import Cause
from control_plane.core.observed.spans import Bucket, JobSpan
from control_plane.core.observed.steps import CheckpointUpload
from control_plane.core.states import IncidentState
from control_plane.core.verification import CheckpointVerdict, Damage, DamageKind
from control_plane.db import checkpoints, events, incidents, jobs, ledger_hours, nodes, protection
from control_plane.db.checkpoints import SavedCheckpoint
from control_plane.db.events import NewEvent
from control_plane.db.incidents import NewIncident
from control_plane.db.leases import Leaser
from control_plane.db.models import JobRow
from control_plane.db.nodes import AgentFacts
from control_plane.db.protection import HolderRecord, ShardRecord, VerifiedRecord
from control_plane.db.tokens import Role
from control_plane.errors import TooManyCases
from everstep.errors import NothingToDownload, TransferFailed
from everstep.protocol.agent_messages import AgentReport, Hello, NodeFault, RunningUpload
from everstep.protocol.ids import FleetName, Generation, JobName, NodeId, Rank, RunId, Step
from everstep.protocol.manifest import (
    MANIFEST_VERSION,
    CheckpointManifest,
    ManifestShard,
    PartsHasher,
    SharedObject,
    encode_manifest,
)
from everstep.protocol.plan import ObjectReference, PlanNode, RankPlan
from everstep.protocol.safetensors import SharedGroup, SharedGroups, encode_header, encode_shared_header
from everstep.protocol.slot import SlotHeader, TensorEntry, payload_chunk_digests
from tests.unit.control_plane.api.conftest import BUCKET, START, USERS_BUCKET, all_pages, refused
from tests.unit.control_plane.db.test_jobs import plan as any_plan
from tests.unit.local_cloud.served import eventually
from tests.unit.worker.storage.slots import header_of, payload_of

OTHER_BYTES = CheckpointVerdict.of(Damage(kind=DamageKind.CONTENT, rank=1, detail="it has other bytes"))


class Job:
    """A job on two nodes. Its methods store rows and objects directly."""

    def __init__(self, service, client, source, **request) -> None:
        self.service = service
        given = {"TrainingJobName": "gpt", "Source": source, "EntryPoint": "train.py", "NodeCount": 2, **request}
        self.run = client.create_training_job(**given)["RunId"]
        self.leaser = Leaser("test", 3.0, lambda: 0.0)

    def write(self, function, *arguments, **named):
        with self.service.database.write() as session:
            lease = self.leaser.claim(session, "job", self.run)
            return function(session, lease, *arguments, **named)

    def launch(self, number: int, *, base: int = 0, count: int = 2) -> None:
        plan = any_plan(number, base)
        members = tuple(
            PlanNode(node_id=NodeId(f"i-{n}"), address="127.0.0.2", peer_port=1, ranks=(Rank(n),)) for n in range(count)
        )
        ranks = tuple(
            RankPlan(rank=Rank(n), holders=(NodeId(f"i-{n}"), NodeId(f"i-{(n + 1) % count}"))) for n in range(count)
        )
        changes = {
            "job": JobName("gpt"),
            "run": RunId(self.run),
            "generation": Generation(number),
            "nodes": members,
            "ranks": ranks,
        }
        fields = {name: getattr(plan, name) for name in plan.__struct_fields__}
        self.write(jobs.add_generation, type(plan)(**{**fields, **changes}), START)
        self.write(jobs.mark_generation_started, number, START)

    def end(self, run: str) -> None:
        """End a job of this service. Its nodes are not released."""
        with self.service.database.write() as session:
            jobs.change(session, self.leaser.claim(session, "job", run), ended_at=self.service.clock(), reason="ended")

    def run_ranks(self) -> None:
        with self.service.database.write() as session:
            lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "job", self.run)
            jobs.transition(session, lease, before="queued", after="running", now=START, reason="trains")

    def connect(self, *node_ids: str) -> None:
        with self.service.database.write() as session:
            for node_id in node_ids:
                facts = AgentFacts(
                    node_id=node_id,
                    fleet_name="main",
                    address="",
                    peer_port=0,
                    memory_bytes=0,
                    agent_id="a",
                    version="1",
                )
                nodes.note_hello(session, facts, initial_state="joining", now=START)

    def put(self, kind: str, path: str, body: bytes = b"x") -> None:
        self.service.objects.put(
            ObjectReference(bucket=BUCKET, key=f"projects/default/jobs/gpt/run={self.run}/{kind}/{path}"), body
        )

    def checkpoint(
        self, step: int, *, generation: int = 1, frozen: bytes = b"", is_replicated: bool = False
    ) -> CheckpointManifest:
        """Store a complete checkpoint of two ranks. Its objects match the manifest.

        If `frozen` is not empty, each rank also has a tensor with this content. By default, the tensor is frozen:
        training does not change it. With `is_replicated`, the tensor is trainable but equal on all ranks. In both
        cases, the ranks share one S3 object with the tensor. The object's folder differs.
        """
        folder = f"checkpoints/run={self.run}/gen={generation}/step={step}"
        shards, shared = [], []
        if frozen:
            entry = TensorEntry("base", "uint8", (len(frozen),), 0, len(frozen))
            whole = encode_shared_header([entry]) + frozen
            sha256 = hashlib.sha256(whole).hexdigest()
            place = f"gen={generation}/step={step}/replicated" if is_replicated else "frozen"
            self.put("checkpoints", f"run={self.run}/{place}/{sha256}.safetensors", whole)
            key = f"projects/default/jobs/gpt/run={self.run}/checkpoints/run={self.run}/{place}/{sha256}.safetensors"
            shared.append(SharedObject(key=key, object_bytes=len(whole), sha256=sha256))
        for rank in range(2):
            header, body = tiny_shard(rank, step, generation, frozen, is_replicated=is_replicated)
            hasher = PartsHasher(1000)
            hasher.update(body)
            self.put("checkpoints", f"run={self.run}/gen={generation}/step={step}/u/rank={rank}.safetensors", body)
            shards.append(
                ManifestShard(
                    rank=Rank(rank),
                    key=f"projects/default/jobs/gpt/run={self.run}/{folder}/u/rank={rank}.safetensors",
                    object_bytes=len(body),
                    etag="e",
                    payload_bytes=header.payload_bytes,
                    payload_digest=header.payload_digest.hex(),
                    layout_hash=header.layout_hash.hex(),
                    origin_generation=Generation(generation),
                    sha256=hasher.hexdigest(),
                    part_bytes=1000,
                )
            )
        manifest = CheckpointManifest(
            version=MANIFEST_VERSION,
            job=JobName("gpt"),
            run=RunId(self.run),
            generation=Generation(generation),
            parent_chain=((Generation(generation), Step(0)),),
            step=Step(step),
            shards=tuple(shards),
            frozen=() if is_replicated else tuple(shared),
            replicated=tuple(shared) if is_replicated else (),
        )
        body = encode_manifest(manifest)
        self.put("checkpoints", f"run={self.run}/gen={generation}/step={step}/manifest.json", body)
        record = SavedCheckpoint(
            generation=generation,
            step=step,
            state=checkpoints.COMPLETE,
            bucket=BUCKET,
            manifest_key=f"projects/default/jobs/gpt/run={self.run}/{folder}/manifest.json",
            manifest=body,
            object_bytes=sum(shard.object_bytes for shard in shards),
            created_at=START,
            completed_at=START,
        )
        self.write(checkpoints.record, record)
        return manifest

    def invalid_checkpoint(self, step: int, state: str) -> None:
        """Store the row of a checkpoint whose manifest cannot be decoded."""
        folder = f"projects/default/jobs/gpt/run={self.run}/checkpoints/run={self.run}/gen=1/step={step}"
        record = SavedCheckpoint(
            generation=1,
            step=step,
            state=state,
            bucket=BUCKET,
            manifest_key=f"{folder}/manifest.json",
            manifest=b"{}",
            object_bytes=1,
            created_at=START,
            completed_at=START,
        )
        self.write(checkpoints.record, record)

    def open_incident(self, incident_id: str, number: int = 0) -> None:
        self.write(
            incidents.open_incident,
            incident_id,
            NewIncident(
                job_name="gpt",
                project="default",
                phase="replace",
                cause="instance_terminated",
                evidence=(Recorded(text="EC2 says terminated"),),
                decision=Recorded(text="a spare takes over"),
                reached_step=12,
                generation_before=1,
                instance_ids=("i-1",),
                faulted_instance_ids=("i-1", "i-2"),
                lost_node_count=1,
                failed_at=START,
                opened_at=START + timedelta(seconds=number),
                detect_seconds=0.5,
                detail={},
            ),
        )


def tiny_shard(
    rank: int, step: int, generation: int, frozen: bytes = b"", *, is_replicated: bool = False, named: str = ""
) -> tuple[SlotHeader, bytes]:
    """Return the slot header and the object of a shard with two tensors.

    The slot has a gap between the tensors and another gap before the index. If `frozen` is not empty, a third tensor
    with this content lies between the two. Its data is in a shared object. The shard names this object by `named`, or
    by its SHA-256 if `named` is empty.
    """
    own = [("w", "uint8", (3,), bytes((rank, step % 256, generation))), ("b", "uint8", (65,), b"x" * 65)]
    tensors, groups = own, []
    if frozen:
        tensors = [own[0], ("base", "uint8", (len(frozen),), frozen), own[1]]
        beginning = encode_shared_header([TensorEntry("base", "uint8", (len(frozen),), 0, len(frozen))])
        groups.append(
            SharedGroup(
                sha256=named or hashlib.sha256(beginning + frozen).hexdigest(),
                object_bytes=len(beginning) + len(frozen),
                data_begin=len(beginning),
                tensors=(1,),
            )
        )
    payload, offset, size = payload_of(tensors, slack=128)
    header = header_of(payload, offset, size, rank=rank, step=step, origin=generation)
    shared = SharedGroups(replicated=tuple(groups)) if is_replicated else SharedGroups(frozen=tuple(groups))
    beginning = encode_header(header, payload[offset:], payload_chunk_digests(payload), shared)
    return header, beginning + b"".join(content for *_, content in own)


@pytest.fixture
def job(service, client, fleet, source):
    return Job(service, client, source)


def shard(rank: int, *in_view: bool, generation: int = 1, reason: str = "") -> ShardRecord:
    holders = tuple(HolderRecord(node_id=f"i-{(rank + n) % 2}", is_in_view=seen) for n, seen in enumerate(in_view))
    return ShardRecord(
        rank=rank,
        generation=generation,
        owner_node_id=f"i-{rank}",
        committed_step=9,
        payload_bytes=100,
        reason=reason,
        holders=holders,
    )


def test_protection_of_a_job_that_has_not_begun(client, job):
    answer = client.describe_protection(TrainingJobName="gpt")
    assert (answer["ProtectionState"], answer["Shards"], answer.get("LastCheckpoint"), answer.get("CommittedAt")) == (
        "Unprotected",
        [],
        None,
        None,
    )
    assert answer["Reason"] == "The job has not committed a step yet: Waiting in the queue of the fleet main."


def test_protection_says_why_nothing_was_ever_kept(client, job):
    job.launch(1)
    job.write(
        protection.record,
        [shard(0, True, True), shard(1, True, True, reason="Protection waits for memory on its node")],
        START,
    )
    answer = client.describe_protection(TrainingJobName="gpt")
    assert answer["ProtectionState"] == "Unprotected"
    assert answer["Reason"] == "The job has not committed a step yet: Rank 1: Protection waits for memory on its node"


def test_protection_of_a_committed_step_that_no_rank_has_reported_yet(client, job):
    job.launch(1)
    job.write(jobs.change, committed_step=908, boundary=908, committed_at=START, reason="starts its ranks")
    answer = client.describe_protection(TrainingJobName="gpt")
    assert (answer["ProtectionState"], answer["CommittedStep"]) == ("Unprotected", 908)
    assert (
        answer["Reason"]
        == "Step 908 was committed, but no rank of generation 1 has reported its holders: starts its ranks"
    )


@pytest.mark.covers("DescribeProtection.TrainingJobName")
def test_protection_of_a_job_that_runs(client, job):
    job.launch(1)
    job.write(jobs.change, committed_step=9, proposed_step=10, boundary=10, committed_at=START)
    job.write(protection.record, [shard(0, True, True), shard(1, True, True)], START)
    answer = client.describe_protection(TrainingJobName="gpt")
    assert (answer["ProtectionState"], answer["Reason"], answer["CommittedStep"], answer["ProposedStep"]) == (
        "Protected",
        "",
        9,
        10,
    )
    assert answer["RecoveryOdds"] == [{"LostNodes": 1, "Probability": 1.0}, {"LostNodes": 2, "Probability": 0.0}]
    assert answer["Shards"][1] == {
        "Rank": 1,
        "OwnerNodeId": "i-1",
        "CommittedStep": 9,
        "Bytes": 100,
        "Holders": [{"NodeId": "i-1", "InView": True}, {"NodeId": "i-0", "InView": True}],
        "Reason": "",
    }
    assert (answer["DomainOdds"], answer["FatalDomains"]) == ([], [])


def test_a_holder_says_which_step_it_holds_since_when_and_how_far_that_is_behind(client, job):
    job.launch(1)
    job.write(jobs.change, committed_step=9, proposed_step=10, boundary=12, committed_at=START)
    verified = (
        VerifiedRecord(node_id="i-0", step=12, at=START),
        VerifiedRecord(node_id="i-1", step=9, at=START + timedelta(seconds=3)),
    )
    known = dataclasses.replace(shard(0, True, False), verified=verified)
    job.write(protection.record, [known, shard(1, True, True)], START)
    own, other = client.describe_protection(TrainingJobName="gpt")["Shards"][0]["Holders"]
    assert own == {"NodeId": "i-0", "InView": True, "VerifiedStep": 12, "VerifiedTime": START, "LagSteps": 0}
    assert other == {
        "NodeId": "i-1",
        "InView": False,
        "VerifiedStep": 9,
        "VerifiedTime": START + timedelta(seconds=3),
        "LagSteps": 3,
    }


@pytest.mark.parametrize(
    ("domains", "odds", "fatal"),
    [
        ({"i-0": "rack0", "i-1": "rack1"}, [(1, 1.0), (2, 0.0)], []),
        ({"i-0": "rack0", "i-1": "rack0"}, [(1, 0.0)], ["rack0"]),
        ({"i-0": "rack0"}, [(1, 1.0), (2, 0.0)], []),
    ],
)
def test_the_loss_of_whole_domains_is_counted_as_far_as_they_are_known(client, job, service, domains, odds, fatal):
    job.connect("i-0", "i-1")
    job.launch(1)
    job.write(jobs.change, committed_step=9)
    job.write(protection.record, [shard(0, True, True), shard(1, True, True)], START)
    with service.database.write() as session:
        lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "fleet", "main")
        for node_id, domain in domains.items():
            nodes.change(session, lease, node_id, initial_state="joining", now=START, failure_domain=domain)
    answer = client.describe_protection(TrainingJobName="gpt")
    assert [(each["LostDomains"], each["Probability"]) for each in answer["DomainOdds"]] == odds
    assert answer["FatalDomains"] == fatal
    assert [each.get("FailureDomain") for each in answer["Shards"][0]["Holders"]] == [
        domains.get("i-0"),
        domains.get("i-1"),
    ]
    # The probability after a loss of single nodes does not depend on failure domains.
    assert answer["RecoveryOdds"][0]["Probability"] == 1.0


@pytest.mark.parametrize(
    ("committed", "shards"),
    [
        (9, [shard(0, True, True), shard(1, True, True)]),
        (9, [shard(0, True, True), shard(1, True, False)]),
        (9, [shard(0, True, True)]),
        (9, [shard(0, True, True), shard(1, True, True, reason="its snapshots are refused")]),
        (9, [shard(0, True, True), shard(1, True, True, generation=2)]),
        (9, []),
        (-1, [shard(0, True, True), shard(1, True, True)]),
    ],
)
def test_a_list_says_of_protection_what_the_job_itself_says(client, job, committed, shards):
    job.launch(1)
    job.write(jobs.change, committed_step=committed)
    job.write(protection.record, shards, START)
    (listed,) = client.list_training_jobs()["TrainingJobSummaries"]
    assert listed["ProtectionState"] == client.describe_protection(TrainingJobName="gpt")["ProtectionState"]


def test_a_list_says_nothing_of_the_protection_of_a_job_that_has_no_memory(client, job):
    (waiting,) = client.list_training_jobs()["TrainingJobSummaries"]
    assert "ProtectionState" not in waiting
    job.launch(1)
    job.write(protection.record, [shard(0, True, True), shard(1, True, True)], START)
    job.write(jobs.change, committed_step=9)
    job.write(jobs.change, state="completed")
    (over,) = client.list_training_jobs()["TrainingJobSummaries"]
    assert "ProtectionState" not in over


def parity_shard(rank: int, *, out_of_view: tuple[int, ...] = (), committed: int = 9) -> ShardRecord:
    """Return the shard of one of six ranks, whose parity groups are the nodes 0 to 2 and 3 to 5."""
    first = rank // 3 * 3
    group = [first + (rank + n) % 3 for n in range(3)]
    return ShardRecord(
        rank=rank,
        generation=1,
        owner_node_id=f"i-{rank}",
        committed_step=committed,
        payload_bytes=100,
        reason="",
        holders=tuple(HolderRecord(node_id=f"i-{node}", is_in_view=node not in out_of_view) for node in group),
    )


@pytest.mark.parametrize(
    ("changed", "state", "words", "odds"),
    [
        (None, "Protected", "", [1.0, 9 / 15, 0.0]),
        (
            parity_shard(1, out_of_view=(2,)),
            "Degraded",
            "1 parity group cannot rebuild a lost shard; rank 1 has i-2 out of view.",
            [0.5, 0.0, 0.0],
        ),
        (
            parity_shard(4, committed=-1),
            "Degraded",
            "1 parity group cannot rebuild a lost shard; rank 4 has not committed a step in this generation.",
            [],
        ),
    ],
)
def test_parity_protects_a_group_while_every_member_is_in_every_view(
    service, client, fleet, source, changed, state, words, odds
):
    job = Job(service, client, source, NodeCount=6, Protection={"ParityGroupSize": 3})
    job.launch(1, count=6)
    job.write(jobs.change, committed_step=9)
    shards = [parity_shard(rank) for rank in range(6)]
    if changed is not None:
        shards[changed.rank] = changed
    job.write(protection.record, shards, START)
    answer = client.describe_protection(TrainingJobName="gpt")
    assert (answer["ParityGroupSize"], answer["ProtectionState"], answer["Reason"]) == (3, state, words)
    assert [each["Probability"] for each in answer["RecoveryOdds"]] == odds
    (listed,) = client.list_training_jobs()["TrainingJobSummaries"]
    assert listed["ProtectionState"] == state


def test_odds_count_holders_in_view_alone(client, job):
    job.launch(1)
    job.write(jobs.change, committed_step=9)
    job.write(protection.record, [shard(0, True, False), shard(1, True, True)], START)
    assert client.describe_protection(TrainingJobName="gpt")["RecoveryOdds"][0] == {"LostNodes": 1, "Probability": 0.5}


def test_odds_that_take_too_long_to_count_are_left_out(client, job, monkeypatch):
    counted = domain_loss.recovery_probability

    def impatient(planned, domains, lost_count):
        if lost_count == 2:
            raise TooManyCases("too many")
        return counted(planned, domains, lost_count)

    monkeypatch.setattr(domain_loss, "recovery_probability", impatient)
    job.launch(1)
    job.write(jobs.change, committed_step=9)
    job.write(protection.record, [shard(0, True, True), shard(1, True, True)], START)
    assert client.describe_protection(TrainingJobName="gpt")["RecoveryOdds"] == [{"LostNodes": 1, "Probability": 1.0}]


def test_no_odds_before_all_shards_are_there(client, job):
    job.launch(1)
    job.write(protection.record, [shard(0, True, True)], START)
    assert client.describe_protection(TrainingJobName="gpt")["RecoveryOdds"] == []


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        (
            [shard(0, True, False, reason="i-1 does not answer"), shard(1, True, True)],
            "1 shards have fewer than 2 copies in view; rank 0 has 1: i-1",
        ),
        ([shard(0, True, True)], "1 of 2 ranks have not reported"),
        ([shard(0, True, True), shard(1, True, True, reason="no room")], "Rank 1: no room"),
    ],
)
def test_protection_that_is_less_than_asked_for_says_so(client, job, shards, words):
    job.launch(1)
    job.write(jobs.change, committed_step=9)
    job.write(protection.record, shards, START)
    answer = client.describe_protection(TrainingJobName="gpt")
    assert answer["ProtectionState"] == "Degraded"
    assert words in answer["Reason"]


def test_holders_of_an_older_generation_do_not_count(client, job):
    job.launch(1)
    job.write(jobs.change, committed_step=9)
    job.write(protection.record, [shard(0, True, True), shard(1, True, True)], START)
    job.launch(2, base=9)
    assert client.describe_protection(TrainingJobName="gpt")["Shards"] == []


@pytest.mark.covers("ListCheckpoints.TrainingJobName")
def test_checkpoints_are_listed_and_the_last_complete_one_is_shown(client, job):
    for step, manifest in ((100, b"m"), (200, None)):
        record = SavedCheckpoint(
            generation=1,
            step=step,
            state="complete" if manifest else "uploading",
            bucket=BUCKET,
            manifest_key=f"{step}/manifest.json",
            manifest=manifest,
            object_bytes=5,
            created_at=START,
            completed_at=START if manifest else None,
        )
        job.write(checkpoints.record, record)
    listed = client.list_checkpoints(TrainingJobName="gpt")["Checkpoints"]
    assert [(entry["Step"], entry["Status"], entry["S3Uri"]) for entry in listed] == [
        (200, "Uploading", f"s3://{BUCKET}/200/manifest.json"),
        (100, "Complete", f"s3://{BUCKET}/100/manifest.json"),
    ]
    assert client.describe_protection(TrainingJobName="gpt")["LastCheckpoint"]["Step"] == 100
    waiter = client.get_waiter("checkpoint_available")
    waiter.wait(TrainingJobName="gpt", MinStep=100, WaiterConfig={"MaxAttempts": 1})
    with pytest.raises(WaiterError):  # the waiter fails, because the requested checkpoint is not complete yet
        waiter.wait(TrainingJobName="gpt", MinStep=101, WaiterConfig={"MaxAttempts": 1})


@pytest.mark.covers("ListCheckpoints.MaxResults", "ListCheckpoints.MinStep", "ListCheckpoints.NextToken")
def test_checkpoints_come_in_pages(client, job):
    for generation, step in ((1, 10), (1, 20), (2, 20), (2, 30), (2, 40)):
        state = "deleted" if step == 30 else "complete"
        record = SavedCheckpoint(
            generation=generation,
            step=step,
            state=state,
            bucket=BUCKET,
            manifest_key=f"{step}",
            manifest=None,
            object_bytes=5,
            created_at=START,
            completed_at=START,
        )
        job.write(checkpoints.record, record)
    pages = client.get_paginator("list_checkpoints").paginate(TrainingJobName="gpt", PaginationConfig={"PageSize": 2})
    assert [[(each["Step"], each["Generation"]) for each in page["Checkpoints"]] for page in pages] == [
        [(40, 2), (20, 2)],
        [(20, 1), (10, 1)],
    ]
    assert [each["Step"] for each in client.list_checkpoints(TrainingJobName="gpt", MinStep=20)["Checkpoints"]] == [
        40,
        20,
        20,
    ]


def test_only_keys_of_the_job_are_read(client, job, service):
    service.objects.put(ObjectReference(bucket=BUCKET, key="sources/secret"), b"s")
    for key in (
        "sources/secret",
        f"projects/default/jobs/gpt/run={job.run}/logs/gen=9/node=i-0/0-1.jsonl",
    ):
        with refused("ResourceNotFoundException"):
            client.get_output(TrainingJobName="gpt", Key=key)["Body"].read()


def test_a_token_has_few_downloads_at_a_time(client, job, service):
    key = f"projects/default/jobs/gpt/run={job.run}/output/gen=1/rank=0/x"
    service.objects.put(ObjectReference(bucket=BUCKET, key=key), b"x")
    open_downloads = service.app.state.services.downloads
    token_id = client.get_caller_identity()["TokenId"]
    open_downloads.update({token_id: OPEN_DOWNLOADS, "another": OPEN_DOWNLOADS})
    with refused("ThrottlingException", match="open downloads"):
        client.get_output(TrainingJobName="gpt", Key=key)["Body"].read()
    del open_downloads[token_id]
    assert client.get_output(TrainingJobName="gpt", Key=key)["Body"].read() == b"x"
    eventually(lambda: token_id not in open_downloads)


def move_outputs(service, run: str, uri: str) -> None:
    """Store an output path that the service would refuse in a new request.

    The database may contain such paths, because earlier versions accepted them.
    """
    with service.database.write() as session:
        row = session.get(JobRow, run)
        row.spec = {**row.spec, "output_uri": uri}


@pytest.mark.parametrize(
    "uri", [f"s3://{BUCKET}/jobs/", f"s3://{BUCKET}/jobs/gpt/", f"s3://{BUCKET}/jobs/victim/run=1/output/"]
)
def test_outputs_among_what_belongs_to_others_are_not_shown(client, job, service, uri):
    key = "jobs/victim/run=1/output/gen=1/rank=0/x"
    service.objects.put(ObjectReference(bucket=BUCKET, key=key), b"secret")
    move_outputs(service, job.run, uri)
    with refused("ResourceNotFoundException", match="next to objects of other jobs"):
        client.list_outputs(TrainingJobName="gpt")
    with refused("ResourceNotFoundException", match="next to objects of other jobs"):
        client.get_output(TrainingJobName="gpt", Key=key)["Body"].read()


def test_a_job_names_its_outputs_that_are_not_in_s3(client, job):
    unstored = {"generation": 1, "outputs": [{"rank": 0, "path": "latest", "cause": "Outside"}], "count": 3}
    job.write(jobs.change, memo={"unstored": unstored})
    shown = client.describe_training_job(TrainingJobName="gpt")
    assert shown["UnstoredOutputs"] == [{"Path": "gen=1/rank=0/latest", "Cause": "Outside"}]
    assert shown["UnstoredOutputCount"] == 3


def test_outputs_in_another_bucket_are_shown_and_keys_beside_them_are_not(client, job, service):
    move_outputs(service, job.run, f"s3://{USERS_BUCKET}/out/gpt/")
    for path in ("another/gen=1/rank=0/x", "gen=1/rank=0/", "gen=1/rank=0/x", "gen=2/rank=0/x", "of-another/gen=1/x"):
        service.objects.put(ObjectReference(bucket=USERS_BUCKET, key=f"out/gpt/{path}"), b"x")
    # A page counts the marker of the folder, and does not show it.
    page = client.list_outputs(TrainingJobName="gpt", MaxResults=2)
    assert [entry["Key"] for entry in page["Outputs"]] == ["out/gpt/gen=1/rank=0/x"]
    assert b"another" not in base64.urlsafe_b64decode(page["NextToken"] + "==")
    rest = client.list_outputs(TrainingJobName="gpt", MaxResults=1, NextToken=page["NextToken"])
    assert [entry["Key"] for entry in rest["Outputs"]] == ["out/gpt/gen=2/rank=0/x"]
    assert "NextToken" not in rest
    assert client.get_output(TrainingJobName="gpt", Key="out/gpt/gen=1/rank=0/x")["Body"].read() == b"x"
    with refused("ResourceNotFoundException"):
        client.get_output(TrainingJobName="gpt", Key="out/gpt/of-another/gen=1/x")["Body"].read()


def test_an_older_jobs_outputs_are_shown_at_their_stored_place(client, job, service):
    own = f"jobs/gpt/run={job.run}/output/"
    move_outputs(service, job.run, f"s3://{BUCKET}/{own}")
    service.objects.put(ObjectReference(bucket=BUCKET, key=f"{own}gen=1/rank=0/x"), b"x")
    assert [entry["Key"] for entry in client.list_outputs(TrainingJobName="gpt")["Outputs"]] == [f"{own}gen=1/rank=0/x"]


@pytest.mark.covers(
    "GetOutput.TrainingJobName",
    "GetOutput.Key",
    "ListOutputs.TrainingJobName",
    "ListOutputs.MaxResults",
    "ListOutputs.NextToken",
)
def test_of_each_path_the_newest_generations_file_is_downloaded(client, job, tmp_path):
    for path, body in {
        "gen=1/rank=0/model.bin": b"old",
        "gen=2/rank=0/model.bin": b"new",
        "gen=2/rank=1/deep/er/état.txt": b"",
        "gen=10/rank=0/a b.txt": b"newest",
        "gen=10/rank=1/big": bytes(3 * 2**20),
    }.items():
        job.put("output", path, body)
    written = client.download_outputs(TrainingJobName="gpt", Directory=tmp_path / "out")
    assert sorted(path.relative_to(tmp_path / "out").as_posix() for path in written) == [
        "rank=0/a b.txt",
        "rank=0/model.bin",
        "rank=1/big",
        "rank=1/deep/er/état.txt",
    ]
    assert (tmp_path / "out/rank=0/model.bin").read_bytes() == b"new"
    assert (tmp_path / "out/rank=0/a b.txt").read_bytes() == b"newest"
    assert (tmp_path / "out/rank=1/big").stat().st_size == 3 * 2**20
    client.download_outputs(TrainingJobName="gpt", Directory=tmp_path / "two", Generation=2)
    assert (tmp_path / "two/rank=1/deep/er/état.txt").read_bytes() == b""
    assert not list(tmp_path.rglob("*.partial"))
    assert len(list(all_pages(client, "list_outputs", TrainingJobName="gpt", MaxResults=2))) == 5


def test_a_browser_stores_an_output_as_a_file(service, job):
    job.put("output", 'gen=1/rank=0/a "b";é.html', b"<script>")
    key = f'projects/default/jobs/gpt/run={job.run}/output/gen=1/rank=0/a "b";é.html'
    answer = httpx.get(
        f"http://{service.address}/v1/training-jobs/gpt/outputs/content",
        params={"Key": key},
        headers={"authorization": f"Bearer {service.admin_token}"},
        trust_env=False,
    )
    assert answer.content == b"<script>"
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''a%20%22b%22%3B%C3%A9.html"
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_an_output_that_would_leave_the_directory_is_not_written(client, job, tmp_path):
    job.put("output", "gen=1/rank=0/../../../evil", b"x")
    with pytest.raises(TransferFailed, match="normalized relative path"):
        client.download_outputs(TrainingJobName="gpt", Directory=tmp_path / "out")
    assert not list(tmp_path.rglob("evil"))


def test_an_output_does_not_follow_links_that_lie_there(client, job, tmp_path):
    job.put("output", "gen=1/rank=0/file", b"x")
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out/rank=0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TransferFailed, match="is a link"):
        client.download_outputs(TrainingJobName="gpt", Directory=tmp_path / "out")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_an_output_that_cannot_be_written_leaves_out_no_other(client, job, tmp_path):
    """A file lies where one output needs a directory. Names of the other outputs are before and after it."""
    for path in ("rank=0/a", "rank=0/b/model.pt", "rank=0/../../x", "rank=1/c"):
        job.put("output", f"gen=1/{path}", b"x")
    (tmp_path / "rank=0").mkdir()
    (tmp_path / "rank=0/b").write_text("mine")
    with pytest.raises(TransferFailed) as caught:
        client.download_outputs(TrainingJobName="gpt", Directory=tmp_path)
    told = str(caught.value)
    assert "2 of 4 files are not in" in told
    assert "rank=0/b/model.pt: " in told
    assert "rank=0/../../x" in told
    assert [(tmp_path / name).read_bytes() for name in ("rank=0/a", "rank=0/b", "rank=1/c")] == [b"x", b"mine", b"x"]


def test_a_job_without_outputs_says_so(client, job, tmp_path):
    with pytest.raises(NothingToDownload, match="has no outputs"):
        client.download_outputs(TrainingJobName="gpt", Directory=tmp_path)


@pytest.mark.covers(
    "DescribeIncident.IncidentId",
    "ListIncidents.TrainingJobName",
    "ListIncidents.MaxResults",
    "ListIncidents.NextToken",
)
def test_incidents_are_listed_and_described(client, job):
    for number in range(3):
        job.open_incident(f"inc-{number}", number)
    assert [
        entry["IncidentId"] for entry in all_pages(client, "list_incidents", TrainingJobName="gpt", MaxResults=1)
    ] == ["inc-0", "inc-1", "inc-2"]
    one = client.describe_incident(IncidentId="inc-1")
    assert (one["Cause"], one["InstanceId"], one.get("ReplacementInstanceId"), one["ReachedStep"]) == (
        "instance_terminated",
        "i-1",
        None,
        12,
    )
    assert (one["InstanceIds"], one["FaultedInstanceIds"]) == (["i-1"], ["i-1", "i-2"])
    assert "StacksEventId" not in one, "no rank stood still"
    with job.service.database.write() as session:
        for seconds, project, of, event_type in (
            (0, "default", "gpt", "RanksHang"),
            (1, "default", "gpt", "RanksHang"),
            (1, "default", "other", "RanksHang"),
            (1, "another", "gpt", "RanksHang"),
            (2, "default", "gpt", "RanksStandStill"),
        ):
            at, words = START + timedelta(seconds=seconds), f"{project} {of} {seconds}"
            events.append(session, events.NewEvent(at=at, type=event_type, message=words, project=project, job_name=of))
    job.write(incidents.change, "inc-1", closed_at=START + timedelta(seconds=5))
    number = client.describe_incident(IncidentId="inc-1")["StacksEventId"]
    (told,) = client.list_events(TrainingJobName="gpt", AfterEventId=number - 1, MaxResults=1)["Events"]
    assert (told["Type"], told["Message"]) == ("RanksHang", "default gpt 1")
    assert "StacksEventId" not in client.describe_incident(IncidentId="inc-2"), "it was opened later"
    assert client.describe_training_job(TrainingJobName="gpt")["IncidentCount"] == 3
    assert client.describe_training_job(TrainingJobName="gpt")["OpenIncidentCount"] == 2
    with refused("ResourceNotFoundException"):
        client.describe_incident(IncidentId="inc-9")
    with refused("ResourceNotFoundException"):
        client.list_incidents(TrainingJobName="other")
    with refused("ValidationException"):
        client.list_incidents(NextToken="bm9uc2Vuc2U=")


def test_an_open_incident_costs_on_and_one_that_is_over_has_the_cost_that_is_stored(client, job, service):
    client.update_fleet(FleetName="main", PriceUsdPerHour=36.0)
    job.open_incident("inc-0")
    job.write(incidents.change, "inc-0", cost_usd=0.5)
    record = OpenIncident(
        id="inc-0",
        state=IncidentState.REPLACING,
        cause=Cause.INSTANCE_TERMINATED,
        evidence=(),
        decision=Recorded(text=""),
        generation_before=Generation(1),
        failed_at=START.timestamp(),
        opened_at=START.timestamp(),
        reached_step=Step(12),
        node_microseconds_before=1_000_000,
    )
    stood = service.clock()
    memo = msgspec.to_builtins(Memo(state_since=0.0, incident=record, node_count=2))
    job.write(jobs.change, memo=memo, node_microseconds=1_000_000, accounted_until=stood)
    service.clock.advance(50)
    told = [client.describe_incident(IncidentId="inc-0"), *client.list_incidents()["Incidents"]]
    assert [one["CostUsd"] for one in told] == pytest.approx([1.0, 1.0]), "two nodes for 50 s"
    job.write(incidents.change, "inc-0", closed_at=START + timedelta(seconds=5), cost_usd=0.7)
    told = [client.describe_incident(IncidentId="inc-0"), *client.list_incidents()["Incidents"]]
    assert [one["CostUsd"] for one in told] == [0.7, 0.7]


def test_a_job_shows_the_upload_of_its_present_generation_only(client, job):
    slowest = RunningUpload(
        rank=Rank(3), step=Step(400), object_name="s3://b/rank=3", stored_bytes=300, object_bytes=500
    )
    upload = CheckpointUpload(
        generation=Generation(2), step=Step(400), stored_bytes=1220, total_bytes=2000, slowest=slowest
    )
    memo = msgspec.to_builtins(Memo(state_since=0.0, uploading=upload))

    def shown():
        return client.describe_training_job(TrainingJobName="gpt")["CheckpointActivity"].get("Upload")

    job.write(jobs.change, memo=memo, generation=2)
    assert shown() == {
        "Step": 400,
        "StoredBytes": 1220,
        "TotalBytes": 2000,
        "SlowestRank": 3,
        "SlowestObject": "s3://b/rank=3",
        "SlowestStoredBytes": 300,
        "SlowestTotalBytes": 500,
    }
    job.write(jobs.change, generation=3)
    assert shown() is None


@pytest.mark.covers("ListIncidents.SortOrder", "ListIncidents.StatusEquals")
def test_incidents_are_listed_newest_first_and_by_whether_they_are_over(client, job):
    for number in range(4):
        job.open_incident(f"inc-{number}", number // 2)
    for number in (0, 3):
        job.write(incidents.change, f"inc-{number}", phase="closed", closed_at=START)
    listed = [
        entry["IncidentId"] for entry in all_pages(client, "list_incidents", SortOrder="Descending", MaxResults=1)
    ]
    assert listed == ["inc-3", "inc-2", "inc-1", "inc-0"]
    assert [entry["IncidentId"] for entry in client.list_incidents(StatusEquals="Open")["Incidents"]] == [
        "inc-1",
        "inc-2",
    ]
    closed = client.list_incidents(TrainingJobName="gpt", StatusEquals="Closed", SortOrder="Descending")
    assert [entry["IncidentId"] for entry in closed["Incidents"]] == ["inc-3", "inc-0"]
    with refused("ValidationException"):
        client.list_incidents(NextToken=client.list_incidents(MaxResults=1)["NextToken"], SortOrder="Descending")
    (summary,) = client.list_training_jobs()["TrainingJobSummaries"]
    assert (summary["IncidentCount"], summary["OpenIncidentCount"]) == (4, 2)


@pytest.mark.covers("ListEvents.AfterEventId", "ListEvents.MaxResults", "ListEvents.NextToken")
def test_events_go_on_where_they_ended(client, job):
    first = client.list_events(MaxResults=1)
    assert [event["EventId"] for event in all_pages(client, "list_events", MaxResults=1)] == [1, 2]
    rest = client.list_events(AfterEventId=first["Events"][0]["EventId"])
    assert [event["Type"] for event in rest["Events"]] == ["TrainingJobCreated"]
    assert client.list_events(AfterEventId=99)["Events"] == []


@pytest.mark.covers("ListNodes.MaxResults", "ListNodes.NextToken")
def test_nodes_come_in_pages(client, job):
    job.connect("i-0", "i-1", "i-2")
    pages = list(client.get_paginator("list_nodes").paginate(FleetName="main", PaginationConfig={"PageSize": 2}))
    assert [[node["NodeId"] for node in page["Nodes"]] for page in pages] == [["i-0", "i-1"], ["i-2"]]


@pytest.mark.covers("ListEvents.SortOrder", "ListEvents.TimeAfter", "ListEvents.TimeBefore")
def test_events_are_listed_newest_first_and_of_a_span_of_time(client, job, service):
    with service.database.write() as session:
        for number in range(3):
            events.append(session, NewEvent(at=START + timedelta(hours=number + 1), type=f"Made{number}", message=""))
    newest = [event["Type"] for event in all_pages(client, "list_events", SortOrder="Descending", MaxResults=2)]
    assert newest[:4] == ["Made2", "Made1", "Made0", "TrainingJobCreated"]
    assert len(newest) == len(client.list_events()["Events"])
    span = {"TimeAfter": START + timedelta(hours=2), "TimeBefore": START + timedelta(hours=3)}
    assert [event["Type"] for event in client.list_events(**span)["Events"]] == ["Made1"]
    first = client.list_events(SortOrder="Descending", MaxResults=1)
    assert [
        event["Type"]
        for event in client.list_events(SortOrder="Descending", AfterEventId=first["Events"][0]["EventId"] - 2)[
            "Events"
        ]
    ] == [
        "Made2",
        "Made1",
    ]
    with refused("ValidationException"):
        client.list_events(NextToken=first["NextToken"])


def test_a_job_says_how_far_it_is_and_how_many_of_its_nodes_are_well(client, job, service):
    (waiting,) = client.list_training_jobs()["TrainingJobSummaries"]
    assert ("TargetStep" in waiting, "EstimatedRemainingSeconds" in waiting, waiting["HealthyNodeCount"]) == (
        False,
        False,
        0,
    )
    job.launch(1)
    job.run_ranks()
    job.connect("i-0", "i-1", "i-2")
    with service.database.write() as session:
        lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "fleet", "main")
        for node_id in ("i-0", "i-1", "i-2"):
            nodes.change(session, lease, node_id, initial_state="joining", now=START, state="assigned", run_id=job.run)
    fault = NodeFault(code="gpu_lost", message="gone", is_permanent=False)
    # only two of three nodes have reported, because the third agent has not connected
    for number, faults in enumerate(((), (fault,))):
        hello = Hello(node_id=NodeId(f"i-{number}"), agent_id="a", address="", peer_port=1, memory_bytes=1, version="1")
        connection = service.app.state.services.registry.accept(hello, FleetName("main"))
        connection.report(AgentReport(node_id=hello.node_id, sequence=1, member=None, faults=faults))
    job.write(jobs.change, target_step=100, boundary=25, max_boundary=25, accounting={"train": 50_000_000})
    (listed,) = client.list_training_jobs()["TrainingJobSummaries"]
    described = client.describe_training_job(TrainingJobName="gpt")
    for shown in (listed, described):
        assert (shown["TargetStep"], shown["EstimatedRemainingSeconds"], shown["HealthyNodeCount"]) == (100, 150.0, 1)
    assert described["Conditions"] == [{"Type": "gpu_lost", "Message": "gone", "NodeId": "i-1"}]
    assert client.describe_node(NodeId="i-1")["Conditions"] == described["Conditions"]
    job.write(jobs.change, state="completed", ended_at=START)
    assert "EstimatedRemainingSeconds" not in client.describe_training_job(TrainingJobName="gpt")
    assert client.describe_training_job(TrainingJobName="gpt")["Conditions"] == []


@pytest.mark.covers("ListTimeSpans.TrainingJobName", "ListTimeSpans.MaxResults", "ListTimeSpans.NextToken")
def test_settled_and_open_spans_of_a_job_are_one_list(client, job):
    assert client.list_time_spans(TrainingJobName="gpt")["TimeSpans"] == []
    begun = round(START.timestamp()) * 1_000_000
    spans = [
        JobSpan(start=begun + second * 1_000_000, bucket=bucket, missing=missing)
        for second, bucket, missing in ((0, Bucket.QUEUE, 0), (5, Bucket.TRAIN, 1), (9, Bucket.DETECT, 0))
    ]
    job.write(ledger_hours.record_spans, spans=list(zip(spans, [span.start for span in spans[1:]], strict=False)))
    open_span = {"start": spans[-1].start, "bucket": "detect", "present": 1, "missing": 0}
    memo = {"state_since": START.timestamp(), "spans": [open_span]}
    job.write(jobs.change, memo=memo, accounted_until=START + timedelta(seconds=11))
    expected = [("queue", 0, 5, 0), ("train", 5, 9, 1), ("detect", 9, None, 0)]
    for size in (1, 2, 1000):
        found = all_pages(client, "list_time_spans", TrainingJobName="gpt", MaxResults=size)
        assert [
            (
                each["Bucket"],
                (each["StartTime"] - START).total_seconds(),
                (each["EndTime"] - START).total_seconds() if "EndTime" in each else None,
                each["MissingNodeCount"],
            )
            for each in found
        ] == expected
    job.write(jobs.change, state="completed", ended_at=START + timedelta(seconds=11))
    assert client.list_time_spans(TrainingJobName="gpt")["TimeSpans"][-1]["EndTime"] == START + timedelta(seconds=11)


@pytest.mark.covers(
    "ListTrainingJobNodes.TrainingJobName", "ListTrainingJobNodes.MaxResults", "ListTrainingJobNodes.NextToken"
)
def test_the_nodes_of_a_job_are_listed_with_the_time_that_they_worked_for_it(client, job):
    assert client.list_training_job_nodes(TrainingJobName="gpt")["Nodes"] == []
    job.launch(1)
    assert client.list_training_job_nodes(TrainingJobName="gpt")["Nodes"] == [
        {"NodeId": f"i-{n}", "StartTime": START} for n in range(2)
    ]
    job.write(jobs.change, state="completed", ended_at=START + timedelta(hours=1))
    ends = {node["EndTime"] for node in client.list_training_job_nodes(TrainingJobName="gpt")["Nodes"]}
    assert ends == {START + timedelta(hours=1)}
    assert [
        node["NodeId"] for node in client.list_training_job_nodes(TrainingJobName="gpt", MaxResults=1)["Nodes"]
    ] == ["i-0"]
    assert [
        node["NodeId"] for node in all_pages(client, "list_training_job_nodes", TrainingJobName="gpt", MaxResults=1)
    ] == ["i-0", "i-1"]
    with refused("ResourceNotFoundException"):
        client.list_training_job_nodes(TrainingJobName="other")


def test_a_node_and_its_fleet_show_the_age_of_their_image(client, job, service):
    job.connect("i-0", "i-1", "i-2")
    assert "OldestImageTime" not in client.describe_fleet(FleetName="main")
    ages = {"i-0": START - timedelta(days=2), "i-1": START - timedelta(days=41), "i-2": None}
    with service.database.write() as session:
        lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "fleet", "main")
        for number, (node_id, at) in enumerate(ages.items()):
            image = {"image_id": f"ami-{number}", "image_created_at": at}
            nodes.change(session, lease, node_id, initial_state="joining", now=START, **image)
    shown = [(node["ImageId"], node.get("ImageCreationTime")) for node in client.list_nodes()["Nodes"]]
    assert shown == [("ami-0", ages["i-0"]), ("ami-1", ages["i-1"]), ("ami-2", None)]
    assert client.describe_fleet(FleetName="main")["OldestImageTime"] == ages["i-1"]


@pytest.mark.covers("DescribeNode.NodeId", "ListNodes.FleetName", "ListNodes.IncludeEnded")
def test_nodes_show_whose_they_are(client, job, service):
    job.connect("i-0", "i-1")
    with service.database.write() as session:
        lease = Leaser("test", 3.0, lambda: 0.0).claim(session, "fleet", "main")
        nodes.change(session, lease, "i-0", initial_state="joining", now=START, state="assigned", run_id=job.run)
        nodes.change(session, lease, "i-1", initial_state="joining", now=START, state="gone", ended_at=START)
    assert [(node["NodeId"], node["NodeStatus"], node["TrainingJobName"]) for node in client.list_nodes()["Nodes"]] == [
        ("i-0", "assigned", "gpt")
    ]
    assert len(client.list_nodes(FleetName="main", IncludeEnded=True)["Nodes"]) == 2
    assert client.describe_node(NodeId="i-1")["EndTime"] is not None
    with refused("ResourceNotFoundException"):
        client.describe_node(NodeId="i-9")


@pytest.mark.covers(
    "CreateTrainingJob.InitialCheckpoint.TrainingJobName",
    "CreateTrainingJob.InitialCheckpoint.RunId",
    "CreateTrainingJob.InitialCheckpoint.Step",
)
def test_a_job_may_start_from_a_checkpoint_of_another_job(client, job, source):
    job.launch(1)
    job.checkpoint(4)
    job.checkpoint(8)

    def initial(name: str, **asked: object) -> dict[str, object]:
        request = {"TrainingJobName": name, "Source": source, "EntryPoint": "train.py", "NodeCount": 1}
        client.create_training_job(**request, InitialCheckpoint=asked)
        return client.describe_training_job(TrainingJobName=name)["InitialCheckpoint"]

    assert initial("newest", TrainingJobName="gpt") == {"TrainingJobName": "gpt", "RunId": job.run, "Step": 8}
    assert initial("older", RunId=job.run, Step=4) == {"TrainingJobName": "gpt", "RunId": job.run, "Step": 4}
    assert "InitialCheckpoint" not in client.describe_training_job(TrainingJobName="gpt")


def test_an_initial_checkpoint_that_cannot_be_used_is_refused_with_the_reason(client, job, source, service, tmp_path):
    request = {"TrainingJobName": "next", "Source": source, "EntryPoint": "train.py", "NodeCount": 1}

    def create(caller=client, **asked: object) -> None:
        caller.create_training_job(**request, InitialCheckpoint=asked)

    with refused("ValidationException", "gpt has no complete checkpoint; ListCheckpoints"):
        create(TrainingJobName="gpt")
    job.launch(1)
    job.checkpoint(4)
    with refused("ValidationException", "gpt has no complete checkpoint of step 5"):
        create(TrainingJobName="gpt", Step=5)
    with refused("ValidationException", "needs one of TrainingJobName and RunId"):
        create(Step=4)
    with refused("ValidationException", "there is no training job 'other'"):
        create(TrainingJobName="other")
    with refused("ValidationException", f"there is no training job '{'0' * 32}'"):
        create(RunId="0" * 32)
    with closing(service.client(service.token(Role.SUBMITTER, "speech"))) as stranger:
        request["Source"] = stranger.upload_source(Directory=tmp_path / "code")
        with refused("ValidationException", "there is no training job 'gpt'"):
            create(stranger, TrainingJobName="gpt")
    with service.database.write() as session:
        (record,) = checkpoints.of_run(session, job.run)
        checkpoints.store_verdict(session, job.run, record, verdict=OTHER_BYTES, now=START)
    with refused("ValidationException", "step 4 is damaged: rank 1: it has other bytes. Choose another Step"):
        create(TrainingJobName="gpt")
    with service.database.write() as session:
        checkpoints.set_state(session, job.run, record, checkpoints.DELETING)
    with refused("ValidationException", "gpt has no complete checkpoint"):
        create(TrainingJobName="gpt")

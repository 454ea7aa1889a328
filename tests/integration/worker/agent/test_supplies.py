"""Inputs, packages and credentials that a job requests for its ranks, on real agents.

They are complete before a rank starts. Otherwise, loading the plan fails, and the agent's report contains the reason.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import json
import logging
import os
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.protocol.agent_messages import KeepSources, Load, MemberPhase, NodeFault, Obstacle
from everstep.protocol.plan import GenerationPlan, InputChannel, ObjectReference, SourceArchive
from tests.integration.worker.agent.fleet import BUCKET, KEY_BYTES, Fleet, until
from tests.wheels import make_wheel
from worker.errors import SourceRefused, StoreDenied
from worker.provisioning.source import SourceArchives
from worker.provisioning.supplies import Supplies

pytestmark = pytest.mark.integration
SET = InputChannel(name="train", prefix=ObjectReference(bucket=BUCKET, key="set/"))


@dataclass
class Needs:
    """A fleet whose job requests inputs, packages or credentials in addition to its source."""

    fleet: Fleet
    script: dict[str, Any]

    def plan(self) -> GenerationPlan:
        plan = self.fleet.make_plan()
        self.fleet.plan = msgspec.structs.replace(plan, script=msgspec.structs.replace(plan.script, **self.script))
        return self.fleet.plan

    async def load(self, phase: MemberPhase = MemberPhase.LOADED) -> None:
        plan = self.plan()
        for node in self.fleet.nodes:
            await self.fleet.send(node, Load(plan=plan, key=bytes([self.fleet.generation]) * KEY_BYTES))
        await until(f"{phase} on all", lambda: self.fleet.members(phase))

    def faults(self) -> list[NodeFault]:
        members = [self.fleet.control.member(node.id) for node in self.fleet.nodes]
        return [fault for member in members if member is not None for fault in member.faults]


@pytest.mark.covers(
    "CreateTrainingJob.InputDataConfig[].ChannelName",
    "CreateTrainingJob.InputDataConfig[].DataSource.S3DataSource.S3Uri",
    "CreateTrainingJob.InputDataConfig[].DataSource.FileSystemDataSource.DirectoryPath",
)
async def test_ranks_find_their_channels_and_get_them_again_in_the_next_generation(
    fleet: Fleet, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    fleet.objects.put_bytes(ObjectReference(bucket=BUCKET, key="set/a"), b"first")
    needs = Needs(fleet, {"inputs": (SET, InputChannel(name="here", directory=str(here)))})
    await fleet.prepare()
    await needs.load()
    assert [node.shim.ranks for node in fleet.nodes] == [{}, {}, {}], (
        "no rank waits for a node that may fetch for hours"
    )
    members = [node.agent.lifecycle.member for node in fleet.nodes]
    for member in members:
        assert member is not None
        member.status.rank_statuses()
        clocks = member.status.clocks
        clocks |= {rank: replace(clock, since=clock.since - 5000.0) for rank, clock in clocks.items()}
    await fleet.start()
    for node in fleet.nodes:
        folder = Path(node.shim.supplied["SM_CHANNEL_TRAIN"])
        assert (folder / "a").read_bytes() == b"first"
        assert json.loads(node.shim.supplied["EVERSTEP_INPUT_CHANNELS"]) == {"train": str(folder), "here": str(here)}
    await fleet.train(3)
    assert all(max(member.status.longest().values(), default=0.0) < 5000 for member in members if member), (
        "nobody stood still while it was fetched"
    )
    assert all(status.still_seconds < 5000 for member in members if member for status in member.status.rank_statuses())
    # The object is deleted. Until the run ends, the node must use its own copy.
    del fleet.objects.objects[BUCKET]["set/a"]
    await fleet.prepare()
    for node in fleet.nodes:
        node.shim.supplied.clear()
    await needs.load()
    assert all(node.shim.supplied["SM_CHANNEL_HERE"] == str(here) for node in fleet.nodes), (
        "started while they load: every node has everything"
    )
    await fleet.start()
    await fleet.train(5)
    await fleet.release()
    assert [list((node.state_dir / "inputs/runs").iterdir()) for node in fleet.nodes] == [[], [], []]


async def test_a_channel_that_is_missing_fails_the_first_load_for_good(fleet: Fleet) -> None:
    needs = Needs(fleet, {"inputs": (SET,)})
    await fleet.prepare()
    await needs.load(MemberPhase.LOAD_FAILED)
    assert {(fault.code, fault.is_permanent) for fault in needs.faults()} == {("input_unavailable", True)}
    assert (
        "InputDataConfig, channel 'train': there is no object at or below s3://bucket/set/" in needs.faults()[0].message
    )
    assert not any(node.shim.ranks for node in fleet.nodes)


async def test_a_job_that_has_trained_is_not_given_up_for_a_channel(fleet: Fleet) -> None:
    await fleet.launch()
    await fleet.train(2)
    await fleet.prepare()
    needs = Needs(fleet, {"inputs": (SET,)})
    await needs.load(MemberPhase.LOAD_FAILED)
    assert {fault.is_permanent for fault in needs.faults()} == {False}


async def test_a_job_that_has_trained_is_not_given_up_for_its_source(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.launch()
    await fleet.train(2)

    def get(_: object, source: SourceArchive) -> Path:
        raise SourceRefused("no space left")

    monkeypatch.setattr(SourceArchives, "get", get)
    await fleet.prepare()
    needs = Needs(fleet, {})
    await needs.load(MemberPhase.LOAD_FAILED)
    assert {(fault.code, fault.is_permanent) for fault in needs.faults()} == {("source_refused", False)}


async def test_a_load_waits_for_a_store_and_continues_in_the_same_generation(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.launch()
    await fleet.train(2)
    await fleet.prepare()
    needs = Needs(fleet, {})

    def get(_: object, source: SourceArchive) -> Path:
        raise StoreDenied("the keys have expired")

    with monkeypatch.context() as outage:
        outage.setattr(SourceArchives, "get", get)
        await needs.load(MemberPhase.LOADING)
        await until("the reports", lambda: len(needs.faults()) == len(fleet.nodes))
        found = {(fault.code, fault.obstacle, fault.is_permanent) for fault in needs.faults()}
        assert found == {("archive_unavailable", Obstacle.DENIED, False)}
    await until("the loads", lambda: fleet.members(MemberPhase.LOADED))
    assert needs.faults() == []
    await fleet.start()
    await fleet.train(4)


@pytest.mark.covers("CreateTrainingJob.Secrets")
async def test_secrets_are_read_for_each_launch_and_are_nowhere_else(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for node in fleet.nodes:
        node.aws.secrets |= {"token": "hunter2-first", "/team/key": "hunter2-key"}
    needs = Needs(fleet, {"secrets": {"TOKEN": "secretsmanager:token", "KEY": "ssm:/team/key"}})
    await fleet.prepare()
    await needs.load()
    await fleet.start()
    assert [node.shim.supplied for node in fleet.nodes] == [{"TOKEN": "hunter2-first", "KEY": "hunter2-key"}] * 3
    await fleet.train(2)
    for node in fleet.nodes:
        node.aws.secrets["token"] = "hunter2-second"
    await fleet.prepare()
    await needs.load()
    await fleet.start()
    assert {node.shim.supplied["TOKEN"] for node in fleet.nodes} == {"hunter2-second"}, (
        "one that was changed has its new value"
    )
    # The agents still remove folders of the generation before. `os.walk` passes over what has gone.
    written = [
        Path(folder, name)
        for node in fleet.nodes
        for root in (node.state_dir, node.sockets)
        for folder, _, names in os.walk(root)
        for name in names
        if Path(folder, name).is_file()
    ]
    assert len(written) > len(fleet.nodes)
    assert [path for path in written if b"hunter2" in path.read_bytes()] == []
    assert "hunter2" not in repr(
        [fleet.control.reports, fleet.plan, [node.agent.lifecycle.supplied for node in fleet.nodes]]
    )
    assert "hunter2" not in caplog.text


async def test_a_secret_that_is_missing_or_no_text_is_told_by_its_variable(fleet: Fleet) -> None:
    for node in fleet.nodes:
        node.aws.secrets["zero"] = "a\0b"
    for reference, words in (
        ("ssm:/none", "Secrets.TOKEN: ssm:/none: there is no such secret"),
        ("ssm:zero", "Secrets.TOKEN: ssm:zero contains a zero byte"),
    ):
        await fleet.prepare()
        needs = Needs(fleet, {"secrets": {"TOKEN": reference}})
        plan = msgspec.structs.replace(needs.plan(), parent=0)
        needs.plan = lambda plan=plan: plan  # type: ignore[method-assign]
        await needs.load(MemberPhase.LOAD_FAILED)
        assert {(fault.code, fault.message, fault.is_permanent) for fault in needs.faults()} == {
            ("secret_unavailable", needs.faults()[0].message, True)
        }
        assert words in needs.faults()[0].message
    assert not any(node.shim.ranks for node in fleet.nodes)


async def test_an_agent_that_dies_between_the_start_and_its_ranks_supplies_them(fleet: Fleet) -> None:
    fleet.objects.put_bytes(ObjectReference(bucket=BUCKET, key="set/a"), b"first")
    needs = Needs(fleet, {"inputs": (SET,)})
    await fleet.prepare()
    await needs.load()
    await fleet.start()
    node = fleet.nodes[1]
    await node.stop()
    await node.shim.forget_started()
    await until("the line to end", lambda: not fleet.control.is_connected(node.id))
    node.start()
    await until("the rank", lambda: bool(node.shim.ranks))
    assert (Path(node.shim.supplied["SM_CHANNEL_TRAIN"]) / "a").read_bytes() == b"first"


async def test_an_agent_that_finds_no_room_for_what_its_ranks_need_says_that_they_were_not_started(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent dies after the start command and before it starts its ranks. The next agent's disk is full.

    The next agent cannot supply what the ranks need, and reports that they were not started. It keeps running, because
    another restart would not free any space.
    """

    async def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    await fleet.launch()
    node = fleet.nodes[1]
    await node.stop()
    await node.shim.forget_started()
    await until("the line to end", lambda: not fleet.control.is_connected(node.id))
    monkeypatch.setattr(Supplies, "gather", full)
    node.start()
    await until(
        "the exit", lambda: (found := fleet.control.member(node.id)) is not None and found.ranks[0].exit is not None
    )
    assert not node.shim.ranks


def with_files(fleet: Fleet, files: dict[str, bytes]) -> dict[str, Any]:
    """Store a source tree of the script and more files. Return the plan's fields for this source."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in {"train.py": b"pass\n", **files}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    place = ObjectReference(bucket=BUCKET, key="other.tar.gz")
    fleet.objects.put_bytes(place, buffer.getvalue())
    return {
        "source": SourceArchive(
            object=place, sha256=hashlib.sha256(buffer.getvalue()).hexdigest(), bytes=len(buffer.getvalue())
        )
    }


@pytest.mark.covers("CreateTrainingJob.Requirements")
async def test_requirements_are_installed_before_ranks_start_and_pips_words_are_in_the_log(
    fleet: Fleet, tmp_path: Path
) -> None:
    wheel = make_wheel(tmp_path / "wheels", "everstep_example", "1.0")
    wanted = b"--no-index\n--find-links .\neverstep_example\n"
    needs = Needs(
        fleet,
        {
            "requirements": "requirements.txt",
            **with_files(fleet, {wheel.name: wheel.read_bytes(), "requirements.txt": wanted}),
        },
    )
    await fleet.prepare()
    await needs.load()
    await fleet.start()
    assert {node.shim.packages.modules for node in fleet.nodes} == {("everstep_example",)}
    assert all((Path(node.shim.packages.path) / "everstep_example.py").is_file() for node in fleet.nodes)

    def shipped() -> bool:
        return any(
            b"Successfully installed everstep_example-1.0" in data
            for data in list(fleet.objects.objects[BUCKET].values())
        )

    await until("pip's words in the store", shipped)


async def test_requirements_that_cannot_be_installed_fail_the_job_with_pips_words(fleet: Fleet) -> None:
    wanted = b"--no-index\neverstep-none==7\n"
    needs = Needs(fleet, {"requirements": "requirements.txt", **with_files(fleet, {"requirements.txt": wanted})})
    await fleet.prepare()
    await needs.load(MemberPhase.LOAD_FAILED)
    for fault in needs.faults():
        assert (fault.code, fault.is_permanent) == ("requirements_failed", True)
        assert "Requirements: requirements.txt: pip ended with code 1:" in fault.message
        assert "No matching distribution found for everstep-none==7" in fault.message
    assert not any(node.shim.ranks for node in fleet.nodes)


ROLE = "arn:aws:iam::123456789012:role/training"


@pytest.mark.covers("CreateTrainingJob.RoleArn")
async def test_a_jobs_role_reads_its_data_and_its_secrets_and_ranks_are_led_to_its_keys(fleet: Fleet) -> None:
    fleet.objects.put_bytes(ObjectReference(bucket=BUCKET, key="set/a"), b"first")
    for node in fleet.nodes:
        node.aws.roles.add(ROLE)
        node.aws.secrets["token"] = "hunter2"
    needs = Needs(fleet, {"role_arn": ROLE, "inputs": (SET,), "secrets": {"TOKEN": "ssm:token"}})
    await fleet.prepare()
    await needs.load()
    await fleet.start()
    for node in fleet.nodes:
        read = [("ssm:token", f"ASIA{1:016}"), ("objects", f"ASIA{2:016}")]
        assert node.aws.used == read, "nothing of the job's is read with the node's own keys"
        assert node.shim.supplied["AWS_CONTAINER_CREDENTIALS_FULL_URI"].startswith("http://127.0.0.1:")
    first = fleet.nodes[0].shim.supplied
    await fleet.nodes[0].stop()
    fleet.nodes[0].start()
    await fleet.connected()
    port = int(first["AWS_CONTAINER_CREDENTIALS_FULL_URI"].split(":")[2].split("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /role HTTP/1.1\r\nAuthorization: {first['AWS_CONTAINER_AUTHORIZATION_TOKEN']}\r\n\r\n".encode())
    assert b"200 OK" in await reader.read(), "ranks that run find the restarted agent"
    writer.close()
    await fleet.release()


async def test_a_role_that_nodes_may_not_assume_fails_the_job(fleet: Fleet) -> None:
    needs = Needs(fleet, {"role_arn": ROLE})
    await fleet.prepare()
    await needs.load(MemberPhase.LOAD_FAILED)
    assert {(fault.code, fault.is_permanent) for fault in needs.faults()} == {("role_unavailable", True)}
    assert f"RoleArn: {ROLE}: everstep-job is not authorized to perform: sts:AssumeRole" in needs.faults()[0].message


def other_source(fleet: Fleet, content: bytes) -> SourceArchive:
    place = ObjectReference(bucket=BUCKET, key=f"other/{content.decode()}")
    fleet.objects.put_bytes(place, content)
    return SourceArchive(object=place, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))


async def test_a_spare_has_its_fleets_sources_ready_and_a_node_that_works_only_its_own(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.connected()
    fetched: list[str] = []
    get_bytes = fleet.objects.get_bytes
    monkeypatch.setattr(
        fleet.objects, "get_bytes", lambda reference: (fetched.append(reference.key), get_bytes(reference))[1]
    )
    theirs, wrong = other_source(fleet, b"theirs"), replace_digest(other_source(fleet, b"wrong"))
    wanted = (fleet.source, theirs, wrong)
    digests = tuple(sorted(source.sha256 for source in wanted))
    for node in fleet.nodes:
        await fleet.send(node, KeepSources(sources=wanted))
    await until("sources", lambda: all(fleet.control.reports[node.id].sources == digests for node in fleet.nodes))
    reads = (*wanted, wrong)  # An agent reads a source with other content twice.
    assert sorted(fetched) == sorted(source.object.key for source in reads for _ in fleet.nodes)
    held = [{path.name for path in (node.state_dir / "sources" / "archives").iterdir()} for node in fleet.nodes]
    assert held == [{f"{fleet.source.sha256}.tar.gz", f"{theirs.sha256}.tar.gz"}] * len(fleet.nodes), (
        "what is unsound is not kept"
    )
    assert [{path.name for path in (node.state_dir / "sources").iterdir()} for node in fleet.nodes] == [
        {"archives"}
    ] * len(fleet.nodes)
    fetched.clear()
    await fleet.prepare()
    await fleet.load()
    assert fleet.source.object.key not in fetched, "it was there"
    for node in fleet.nodes:
        assert [path.name for path in (node.state_dir / "sources" / "archives").iterdir()] == [
            f"{fleet.source.sha256}.tar.gz"
        ]
        await fleet.send(node, KeepSources(sources=wanted))  # a node with a job ignores this message
    await fleet.start()
    for node in fleet.nodes:
        assert [path.name for path in (node.state_dir / "sources" / "archives").iterdir()] == [
            f"{fleet.source.sha256}.tar.gz"
        ]
    await fleet.release()
    await until("nothing left", lambda: all(fleet.control.reports[node.id].sources == () for node in fleet.nodes))


def replace_digest(source: SourceArchive) -> SourceArchive:
    return msgspec.structs.replace(source, sha256="0" * 64)

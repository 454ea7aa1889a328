"""Recordings: loading restores the stored rows.

A shuffled recording, with other names and numbers, stays consistent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.accounts import facts, responses
from control_plane.core import accounting
from control_plane.core.observed.facts import Fact
from control_plane.core.observed.incidents import Response
from control_plane.db import metrics, schema
from control_plane.db.session import Database
from everstep.protocol.agent_messages import MetricBatch, MetricPoint
from everstep.protocol.ids import Generation, RunId, Step
from everstep.protocol.log_chunks import decode_chunk
from everstep.protocol.plan import ObjectReference
from tests.dashboard.printed import print_run
from tests.dashboard.record import STORIES
from tests.dashboard.recording import FOLDER, Recording, RecordingStale, every, load, read, rows_of, write
from tests.dashboard.shuffle import Deal, deal, shuffled
from tests.fakes.cloud import MemoryObjectStore
from tests.sim.world import BUCKET, World

SEEDS = st.integers(0, 2**32)
RULED = re.compile(
    r"\b(?:i|nn|inc|tok)-[0-9a-f-]+|\bstep(?: beyond)? \d+|\d+ steps?\b|[\d.]+ s\b|\d\d:\d\d:\d\d UTC|us-east-1a"
    r"|c7i\.2xlarge|EC2|\b[Ss]3\b|(?i:gpu|xid) \d+|s3://\S+"
    r"|(?:rank|generation|launch|code|signal) \d+|NVIDIA H100 80GB HBM3"
    r"|\b\w+\.py:\d+|error \(\d+\)|\d+ (?:nodes?|instances?|spares|ranks|copies|shards|replaced|times|failures|are identical|are replaced)\b"
    r"|[\d,]+ bytes"
)
"""Patterns for parts of sentences that contain digits. The shuffle must have a rule for each: change it, or keep it."""


@pytest.fixture
def lived(tmp_path: Path) -> Iterator[World]:
    with closing(World(tmp_path, nodes=3)) as world:
        world.wish(price_usd_per_hour=12.5)
        yield world


def story(name: str) -> Recording:
    return read(FOLDER / f"{name}.json")


async def recorded(world: World) -> Recording:
    """Run a job of a small simulated fleet through one incident, and return the recording."""
    world.submit(nodes=3)
    await world.running()
    await world.train(5)
    await world.upload(5)
    world.kill_rank(world.team()[1])
    await world.until(lambda: bool(world.incidents()) and world.job().state == "running")
    await world.train(5)
    run = RunId(world.job().run_id)
    point = MetricPoint(
        generation=Generation(2),
        step=Step(7),
        values={"everstep/gpu_percent": 80.0, "loss": 1.5},
        at_seconds=world.now.timestamp(),
    )
    measured = {agent.node_id: {"everstep/gpu_percent": 10.0 * agent.number} for agent in world.team()}
    with world.database.write() as session:
        metrics.store(session, "agent", MetricBatch(run=run, first_number=0, points=(point,)), measured)
    print_run(world, "gpt", {})
    objects = {key: text for key, text in texts(world.objects).items() if "/logs/" in key}
    return Recording(story="bad-gpu", ended_at=world.now, strikes=(), tables=rows_of(world.database), objects=objects)


def texts(objects: MemoryObjectStore) -> dict[str, str]:
    """Return all objects of the bucket, by key."""
    return {
        info.reference.key: objects.get(info.reference).decode()
        for info in objects.list(ObjectReference(bucket=BUCKET, key=""))
    }


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Database]:
    (tmp_path / "empty").mkdir()
    with closing(Database(f"sqlite:///{tmp_path / 'empty' / 'everstep.db'}")) as database:
        schema.migrate(database)
        yield database


async def test_what_is_loaded_is_what_was_stored(lived: World, empty: Database, tmp_path: Path) -> None:
    recording = await recorded(lived)
    assert all(
        recording.tables[name]
        for name in ("fleet", "node", "job", "generation", "checkpoint", "incident", "metric_chunk", "event")
    )
    write(recording, tmp_path / "story.json")
    again = read(tmp_path / "story.json")
    assert again == recording
    objects = MemoryObjectStore(BUCKET)
    load([again], empty, objects)
    assert rows_of(empty) == recording.tables
    assert texts(objects) == recording.objects


@pytest.mark.parametrize("spoil", ["column", "table", "plan"])
async def test_a_recording_that_does_not_fit_says_how_to_record_it_anew_and_nothing_is_loaded(
    lived: World, empty: Database, spoil: str
) -> None:
    recording = await recorded(lived)
    match spoil:
        case "column":
            del recording.tables["incident"][0]["cause"]
        case "table":
            del recording.tables["notice"]
        case "plan":
            del recording.tables["generation"][0]["plan"]["run"]
    with pytest.raises(RecordingStale, match=r"python -m tests\.dashboard\.record bad-gpu"):
        load([recording], empty, MemoryObjectStore(BUCKET))
    assert not any(rows_of(empty).values())


def test_there_is_a_recording_of_every_story_and_it_says_how_it_was_struck() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == STORIES.keys() == {recording.story for recording in every()}
    for recording in every():
        assert all(strike.command.startswith("everstep local fault ") for strike in recording.strikes)
        # only the incident "crash-loop" has no fault command, because its script fails by itself
        assert bool(recording.strikes) is (recording.story != "crash-loop")
        assert recording.tables["incident"]


@pytest.mark.parametrize("name", STORIES)
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS)
def test_a_shuffled_recording_is_the_same_story(name: str, seed: int) -> None:
    recording = story(name)
    (dealt,) = deal(seed, 1)
    found = shuffled(recording, dealt)
    assert found == shuffled(recording, dealt)
    ids_are_other_ones(recording, found)
    times_and_sums_still_add_up(found, dealt)
    columns_and_sentences_agree(recording, found, dealt)
    logs_are_read(recording, found)


def ids_are_other_ones(recording: Recording, found: Recording) -> None:
    """Check that no old name or id remains, and that equal names stay equal."""
    text = json.dumps(msgspec.to_builtins(found))
    old = [recording.job["name"], recording.job["run_id"], *(node["id"] for node in recording.tables["node"])]
    assert [name for name in old if name in text] == []
    run, nodes = found.job["run_id"], {node["id"] for node in found.tables["node"]}
    assert len(nodes) == len(recording.tables["node"])
    for incident in found.tables["incident"]:
        assert incident["run_id"] == run
        assert incident["job_name"] == found.job["name"]
        assert {*incident["instance_ids"], *incident["replacement_instance_ids"]} <= nodes
        assert incident["id"] == f"inc-{run[:12]}-{incident['generation_before']}"
    for generation in found.tables["generation"]:
        assert generation["plan"]["run"] == generation["run_id"] == run
        assert {node["node_id"] for node in generation["plan"]["nodes"]} <= nodes
    assert {event["fleet_name"] for event in found.tables["event"]} <= {found.tables["fleet"][0]["name"], None}
    assert set(re.findall(r"\bi-[0-9a-f]{17}\b", text)) <= nodes


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def times_and_sums_still_add_up(found: Recording, dealt: Deal) -> None:
    """Check that the entries of the ledger, the phases of each incident and the cost still have the right sums."""
    job, (fleet,) = found.job, found.tables["fleet"]
    assert timedelta(microseconds=sum(job["accounting"].values())) == moment(job["accounted_until"]) - moment(
        job["created_at"]
    )
    cost = accounting.cost_usd(job["node_microseconds"], fleet["price_usd_per_hour"])
    assert job["cost_usd"] == pytest.approx(cost)
    for incident in found.tables["incident"]:
        took = [incident[f"{phase}_seconds"] for phase in ("detect", "replace", "restore", "rework")]
        if incident["closed_at"] is not None:
            assert sum(took) == pytest.approx(
                (moment(incident["closed_at"]) - moment(incident["failed_at"])).total_seconds(), abs=1e-4
            )
        assert took[0] == pytest.approx(
            (moment(incident["opened_at"]) - moment(incident["failed_at"])).total_seconds(), abs=1e-4
        )
        if None not in (incident["lost_steps"], incident["from_step"], incident["reached_step"]):
            assert incident["lost_steps"] == max(0, incident["reached_step"] - incident["from_step"])
    assert max(moment(event["at"]) for event in found.tables["event"]) <= found.ended_at == dealt.ends_at


def columns_and_sentences_agree(recording: Recording, found: Recording, dealt: Deal) -> None:
    """Check that the shuffle scales steps in sentences and in columns by the same factor."""
    before = {value for value in steps_of(recording) if value > 0}
    after = {value * dealt.step_factor for value in before}
    assert {value for value in steps_of(found) if value > 0} == after
    for old, new in zip(sentences(recording), sentences(found), strict=True):
        for said, says in zip(re.findall(r"\bstep (\d+)", old), re.findall(r"\bstep (\d+)", new), strict=True):
            assert int(says) == int(said) * dealt.step_factor
        assert re.findall(r"\d+", RULED.sub("", old)) == [], f"no rule says what becomes of a figure in: {old}"


def steps_of(recording: Recording) -> Iterator[int]:
    for table, names in {
        "job": ("base_step", "committed_step", "boundary", "max_boundary"),
        "incident": ("from_step", "reached_step", "lost_steps"),
        "checkpoint": ("step",),
        "shard": ("committed_step",),
        "generation": ("base_step",),
    }.items():
        yield from (row[name] for row in recording.tables[table] for name in names if row[name] is not None)


def sentences(recording: Recording) -> Iterator[str]:
    for incident in recording.tables["incident"]:
        yield from (facts.sentence(each) for each in msgspec.convert(incident["evidence"], tuple[Fact, ...]))
        yield responses.response(msgspec.convert(incident["decision"], Response))
    for said in (recording.job["reason"], *(event["message"] for event in recording.tables["event"])):
        yield said.partition("\n")[0]  # only the first line is a sentence of Everstep; the script's output follows


def logs_are_read(recording: Recording, found: Recording) -> None:
    chunks: list[tuple[Any, list[Any]]] = []
    for key, text in found.objects.items():
        if key.endswith(".jsonl"):
            head, lines, length = decode_chunk(text.encode())
            assert head is not None
            assert length == len(text.encode())
            assert int(re.findall(r"-(\d+)(?:\.i-[0-9a-f]+)?\.jsonl", key)[0]) <= lines[0].at_ms
            assert max(line.at_ms for line in lines) / 1000 <= found.ended_at.timestamp()
            chunks.append((head, lines))
    assert sum(len(lines) for _, lines in chunks) > 10
    assert len(found.objects) == len(recording.objects)


@given(seed=SEEDS)
def test_no_two_of_a_deal_have_the_same_names_and_a_seed_repeats_it(seed: int) -> None:
    dealt = deal(seed, len(STORIES))
    assert len({each.job for each in dealt}) == len({each.fleet for each in dealt}) == len(STORIES)
    # all recordings end at the same time, because they share a server with one clock
    assert {each.ends_at for each in dealt} == {dealt[0].ends_at}
    assert dealt == deal(seed, len(STORIES))


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (
            "restores step 31 from memory: the newest step that every rank can get",
            "restores step 93 from memory: the newest step that every rank can get",
        ),
        ("step    31  loss 2.3019", "step    93  loss 2.3019"),
        ("step 9,999", "step 29,997"),
        ("4 times after step 33, also from an older one", "4 times after step 99, also from an older one"),
        ("3 steps are made again", "9 steps are made again"),
        ("1 step", "3 steps"),
        ("silent for 4.5 s, longer than 3 s", "silent for 9.0 s, longer than 6 s"),
        ("rank 1 on {node} ended: error, code 1", "rank 1 on {node} ended: error, code 1"),
        ("GPU 5: Xid 79", "GPU 5: Xid 79"),
        ("Waiting in the queue of the fleet {fleet}.", "Waiting in the queue of the fleet {fleet}."),
        (
            "jobs/{job}/checkpoints/run={run}/gen=2/step=20/manifest.json",
            "jobs/{job}/checkpoints/run={run}/gen=2/step=60/manifest.json",
        ),
        ("{job}-2 is another job", "{job}-2 is another job"),
        ("from the local memory", "from the local memory"),
    ],
)
def test_a_sentence_is_reworded_as_the_columns_are(said: str, says: str) -> None:
    recording = story("bad-gpu")
    (dealt,) = deal(3, 1)
    dealt = replace(dealt, pace=2, step_factor=3)
    names = {
        "node": recording.tables["node"][0]["id"],
        "fleet": "local",
        "job": recording.job["name"],
        "run": recording.job["run_id"],
    }
    recording.tables["event"][0]["message"] = said.format(**names)
    found = shuffled(recording, dealt)
    others = {"node": found.tables["node"][0]["id"], "fleet": dealt.fleet, "job": dealt.job, "run": found.job["run_id"]}
    assert found.tables["event"][0]["message"] == says.format(**others)

"""Runs the real loops on a job of a simulated fleet, which has one failure of each kind and records its incident."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import pytest

from control_plane.api import views
from control_plane.cloud.errors import AccessDenied
from control_plane.core.observed.spans import Bucket
from control_plane.core.states import JobState
from control_plane.db import fleets, incidents, jobs, protection
from control_plane.loop import disposition
from everstep.protocol.agent_messages import ExitClass, Prepare
from everstep.protocol.ids import Generation
from tests.postgresql import BOTH_ENGINES
from tests.sim.world import GROUP, World, evidence_of

pytestmark = pytest.mark.parametrize("engine", BOTH_ENGINES)


def phases_add_up(world: World) -> None:
    for incident in world.incidents():
        assert incident.closed_at is not None
        phases = (incident.detect_seconds, incident.replace_seconds, incident.restore_seconds, incident.rework_seconds)
        assert all(phase is not None and phase >= 0 for phase in phases)
        assert sum(phase or 0.0 for phase in phases) == pytest.approx(
            (incident.closed_at - incident.failed_at).total_seconds()
        )


async def test_a_job_runs_from_submission_to_its_end(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(5)
    world.finish()
    await world.until(lambda: world.job().state == JobState.COMPLETED)
    job = world.job()
    assert job.generation == 1
    assert [transition.state for transition in job.transitions] == [
        "queued",
        "allocating",
        "preparing",
        "loading",
        "starting",
        "running",
        "completed",
    ]
    assert not world.incidents()
    assert sum(job.accounting.values()) == (job.ended_at - job.created_at) // timedelta(microseconds=1)
    await world.until(lambda: all(agent.run is None for agent in world.agents.values()))


async def test_a_launch_trains_from_its_first_new_step_on(world: World) -> None:
    def shown() -> list[str]:
        return [status.value for status, _ in groupby(each.status for each in views.status_transitions(world.job()))]

    world.submit()
    await world.running()
    for _ in range(10):
        await world.tick()
    job = world.job()
    assert (disposition.secondary_status_of(job), job.accounting.get(Bucket.TRAIN, 0)) == ("Starting", 0)
    assert job.reason.startswith("making the first step on i-00000000000000001, ")
    assert job.reason.endswith(" and 1 more")
    assert shown()[-1] == "Starting"
    await world.train(3)
    for _ in range(4):
        await world.tick()
    assert disposition.secondary_status_of(world.job()) == shown()[-1] == "Training"
    world.kill_rank(world.team()[2])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    assert disposition.secondary_status_of(world.job()) == shown()[-1] == "Restarting"
    await world.train(5)
    await world.until(lambda: not world.job().memo.get("incident"))
    assert shown() == ["Pending", "Starting", "Downloading", "Starting", "Training", "Restarting", "Training"]


async def test_nodes_carry_the_tags_of_their_job_while_they_work(world: World) -> None:
    def tags() -> list[tuple[str, ...]]:
        members = list(world.nodes())
        return sorted(tuple(each.work_tags.values()) for each in world.operator.describe_instances(members).values())

    world.operator.tagging_error = AccessDenied("not allowed")
    world.submit()
    await world.running()
    await world.train(1)
    assert not any(tags()), "a refusal delays nothing"
    world.operator.tagging_error = None
    await world.until(lambda: tags()[-1] == ("gpt", ""))
    assert [each for each in tags() if each] == [("gpt", "")] * len(world.team())
    world.finish()
    await world.until(lambda: world.job().state == JobState.COMPLETED)
    await world.until(lambda: not any(tags()))


async def test_nodes_use_tls_until_ec2_has_described_their_type_as_encrypting(world: World) -> None:
    world.operator.change_group(GROUP, lambda group: replace(group, encrypting_types=frozenset()))
    world.submit()
    await world.running()
    assert world.plan().encrypts_peers
    world.operator.change_group(GROUP, lambda group: replace(group, encrypting_types=frozenset({"p5.48xlarge"})))
    await world.train(1)
    world.kill_rank(world.team()[2])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    assert not world.plan().encrypts_peers


async def test_a_fleets_setting_for_tls_takes_effect_with_the_next_launch(world: World) -> None:
    world.submit()
    await world.running()
    assert not world.plan().encrypts_peers  # EC2 encrypts between instances of this fleet's type.
    with world.database.write() as session:
        fleets.set_wanted(session, "main", replica_encryption="On")
    await world.train(1)
    assert not world.plan().encrypts_peers
    world.kill_rank(world.team()[2])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    assert world.plan().encrypts_peers


async def test_what_the_script_says_of_its_end_is_kept_and_a_launch_that_says_nothing_takes_nothing_back(
    world: World,
) -> None:
    world.submit()
    await world.running()
    assert world.job().target_step == -1
    for agent in world.team():
        agent.target = 5_000
    await world.train(1)
    assert world.job().target_step == 5_000
    for agent in world.agents.values():
        agent.target = 0
    world.kill_rank(world.team()[2])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    await world.train(2)
    assert world.job().target_step == 5_000


async def test_it_is_stored_which_step_each_holder_holds_and_since_when(world: World) -> None:
    run = world.submit()
    await world.running()
    await world.train(5)
    await world.tick()
    owner, holder = world.plan().ranks[0].holders
    with world.database.read() as session:
        shard = protection.of_run(session, run)[0]
    assert {each.node_id: each.step for each in shard.verified} == {owner: 5, holder: 5}
    assert all(each.at <= world.now for each in shard.verified)


async def test_an_agent_that_says_nothing_while_nothing_is_committed_vouches_for_no_shard(world: World) -> None:
    """While a job commits no step, its shards on a frozen agent's node count as unprotected.

    The frozen agent's last report listed its shards as intact, and its ranks may continue to train.
    """
    run = world.submit()
    await world.running()
    await world.train(5)
    silent = world.team()[0]

    def told() -> set[str]:
        with world.database.read() as session:
            return {shard.reason for shard in protection.of_run(session, run) if shard.owner_node_id == silent.node_id}

    await world.tick()
    assert told() == {""}
    silent.is_deaf = True
    await world.until(lambda: told() == {f"the agent of {silent.node_id} says nothing, and no step is committed"})
    with world.database.read() as session:
        shards, job = protection.of_run(session, run), world.job()
        holders = [holder for shard in shards for holder in shard.holders]
    assert {holder.node_id for holder in holders if not holder.is_in_view} == {silent.node_id}
    odds = {each.lost_nodes: each.probability for each in views.protection(job, shards, None, {}).recovery_odds}
    assert odds[1] < 1, "the loss of the other holder would not be survived from memory"
    with world.database.read() as session:
        shards = protection.of_run(session, run)
    held = {shard.rank for shard in shards for holder in shard.holders if holder.node_id == silent.node_id}
    assert {shard.rank for shard in shards if silent.node_id in shard.reason} == held, (
        "each shard that lost a copy names the node"
    )
    assert {shard.rank for shard in shards if shard.reason} == held
    silent.is_deaf = False
    await world.until(lambda: told() == {""})
    assert world.job().generation == 1


async def test_a_killed_rank_restarts_all_ranks_from_their_own_memory(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    before = world.plan()
    world.kill_rank(world.team()[2])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    await world.train(3)
    await world.tick()
    (incident,) = world.incidents()
    assert (incident.cause, incident.restore_source, incident.from_step, incident.lost_steps) == (
        "rank_exit",
        "local",
        10,
        0,
    )
    assert "rank 2" in evidence_of(incident)[0]
    assert [node.node_id for node in world.plan().nodes] == [node.node_id for node in before.nodes]
    assert incident.phase == "closed"
    phases_add_up(world)


async def test_steps_that_no_report_told_of_are_counted_as_lost(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    team = world.team()
    team[1].unheard = 2
    world.kill_rank(team[2])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    await world.train(4)
    await world.tick()
    (first,) = world.incidents()
    assert (first.from_step, first.lost_steps) == (10, 2)
    assert first.closed_at is not None
    world.kill_rank(team[2])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 3)
    await world.train(3)
    await world.tick()
    assert [incident.lost_steps for incident in world.incidents()] == [2, 0], (
        "what ranks of an earlier generation had reached is no loss of this one"
    )


async def test_a_terminated_instance_is_replaced_by_the_spare_in_its_place(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    before = [node.node_id for node in world.plan().nodes]
    lost = world.team()[1]
    world.terminate(lost)
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    after = [node.node_id for node in world.plan().nodes]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True, True]
    await world.train(3)
    await world.tick()
    (incident,) = world.incidents()
    assert (incident.cause, incident.restore_source, incident.from_step) == ("instance_terminated", "peer", 10)
    assert incident.instance_ids == (lost.node_id,)
    assert incident.replacement_instance_ids == (after[1],)
    phases_add_up(world)
    await world.until(lambda: len(world.agents) == 5)
    changes = [call for call in world.operator.calls if call[0] in ("terminate_member", "launch_instances")]
    assert changes[-2:] == [("terminate_member", lost.node_id, True), ("launch_instances", "group", 1)]


async def test_a_lost_group_waits_for_instances_and_resumes_from_s3(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    await world.upload(10)
    assert [checkpoint.step for checkpoint in world.checkpoints()] == [10]
    await world.train(5)
    first, second = world.team()[:2]
    world.terminate(first)
    world.terminate(second)
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    await world.train(6)
    await world.tick()
    (incident,) = world.incidents()
    assert (incident.cause, incident.restore_source, incident.from_step, incident.lost_steps) == (
        "group_lost",
        "s3",
        10,
        5,
    )
    assert set(incident.instance_ids) == {first.node_id, second.node_id}
    assert len(incident.replacement_instance_ids) == 2
    phases_add_up(world)


@pytest.mark.covers("CreateTrainingJob.RetryStrategy.MaxAttempts")
async def test_a_crash_loop_ends_with_the_last_lines(world: World) -> None:
    world.submit(max_attempts=3)
    # three generations fail on the same node, and generation 4 runs the rank on another node
    for generation in (1, 2, 3, 4):
        await world.until(
            lambda generation=generation: world.job().state == JobState.RUNNING and world.job().generation == generation
        )
        world.kill_rank(world.team()[0], exit_class=ExitClass.ERROR, code=1, lines="NameError: name 'x' is not defined")
        await world.tick()
    await world.until(lambda: world.job().state == JobState.FAILED)
    assert "4 times" in world.job().reason
    assert "also without" in world.job().reason
    assert "NameError" in world.job().reason
    with world.database.read() as session:
        totals = incidents.totals(session, run_id=world.job().run_id)
    assert (totals.failure_count, totals.closed_count, totals.recovered_count) == (1, 1, 0), "nothing has recovered"
    await world.until(lambda: all(agent.run is None for agent in world.agents.values()))


async def test_a_restarted_control_plane_disturbs_nothing(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    said = len(world.said)
    world.start_server()
    for _ in range(60):
        await world.train(1)
    assert world.job().state == JobState.RUNNING
    assert world.job().generation == 1
    assert world.job().boundary >= 60
    assert not world.incidents()
    assert len(world.said) == said


async def test_a_spare_has_the_source_of_the_job_that_it_may_be_given_to(world: World) -> None:
    world.submit()
    await world.running()
    for _ in range(3):
        await world.tick()
    assert [agent.sources for agent in world.agents.values() if agent.run is None] == [("0" * 64,)]
    assert {agent.sources for agent in world.team()} == {()}
    said = len(world.said)
    for _ in range(5):
        await world.train(1)
    assert len(world.said) == said, "told once"
    world.finish()
    await world.until(lambda: world.job().state == JobState.COMPLETED)
    await world.until(lambda: all(agent.run is None and agent.sources == () for agent in world.agents.values()))


async def test_time_and_money_of_a_job_and_its_fleet(world: World) -> None:
    """A job on four nodes loses two nodes at the same time. Its times and costs are exact.

    The fleet's only spare replaces the first lost node at once. AWS must launch an instance to replace the second.
    Until this instance has booted, the job holds three nodes, which wait. Then four nodes train.
    """
    with world.database.write() as session:
        fleets.set_wanted(session, "main", price_usd_per_hour=36.0)
    world.submit()
    await world.running()
    await world.train(20)
    for agent in (world.team()[0], world.team()[2]):
        world.terminate(agent)
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    await world.train(1)
    await world.until(lambda: len(world.incidents()) == 1 and world.incidents()[0].closed_at is not None)
    world.finish()
    await world.until(lambda: world.job().state == JobState.COMPLETED)
    job, (incident,) = world.job(), world.incidents()
    assert job.ended_at is not None
    assert sum(job.accounting.values()) == (job.ended_at - job.created_at) // timedelta(microseconds=1)
    with_nodes = sum(
        spent for bucket, spent in job.accounting.items() if bucket not in (Bucket.QUEUE, Bucket.PROVISION)
    )
    assert 3 * with_nodes < job.node_microseconds < 4 * with_nodes
    assert job.cost_usd == pytest.approx(job.node_microseconds / 1e6 * 0.01)
    assert incident.closed_at is not None
    lasted = (incident.closed_at - incident.failed_at).total_seconds()
    assert incident.cost_usd is not None
    assert 3 * lasted * 0.01 <= incident.cost_usd < 4 * lasted * 0.01
    assert incident.rank_sources == (("peer", 1), ("local", 1), ("peer", 1), ("local", 1))
    with world.database.read() as session:
        of_jobs = jobs.totals(session, "main", tuple(Bucket))
        of_incidents = incidents.totals(session, fleet_name="main")
        assert incidents.totals(session, fleet_name="other").count == 0
        assert jobs.totals(session, "other", tuple(Bucket)).node_microseconds == 0
    assert (of_jobs.spent, of_jobs.node_microseconds, of_jobs.cost_usd) == (
        job.accounting,
        job.node_microseconds,
        job.cost_usd,
    )
    assert (of_incidents.count, of_incidents.closed_count) == (1, 1)
    assert world.failures() == (1, 1, 2)
    assert of_incidents.mean_recovery_seconds == pytest.approx(lasted)
    assert of_incidents.cost_usd == incident.cost_usd


async def test_a_loss_during_the_control_planes_absence_began_when_the_other_ranks_missed_the_node(
    world: World,
) -> None:
    """A node is lost while no control plane runs. The failure time is when the other ranks noticed the loss.

    AWS reports the ended instance immediately. The agents reconnect a moment later, and then report when training
    stopped.
    """
    world.submit()
    await world.running()
    await world.train(5)
    *others, lost = world.team()
    world.terminate(lost)
    failed_at = world.now + timedelta(seconds=2)
    world.now = failed_at
    world.kill_rank(others[0], exit_class=ExitClass.ERROR, code=1)
    for agent in world.agents.values():
        agent.is_deaf = True
    world.now += timedelta(minutes=1)
    world.operator.advance(timedelta(minutes=1))
    world.start_server()
    await world.until(lambda: bool(world.incidents()))
    assert world.incidents()[0].failed_at > failed_at  # an agent has reported a more exact time
    for agent in world.agents.values():
        agent.is_deaf = False
    await world.until(lambda: world.job().generation == 2)
    await world.running()
    await world.train(5)
    phases_add_up(world)
    (incident,) = world.incidents()
    assert (incident.cause, incident.failed_at) == ("instance_terminated", failed_at)
    (absence,) = [each for each in evidence_of(incident) if each.startswith("no control plane")]
    told = re.fullmatch(r"no control plane was running for (\d+) s, until (\d\d:\d\d:\d\d) UTC", absence)
    assert told is not None
    seconds, until = told.groups()
    assert int(seconds) == round((incident.opened_at - failed_at).total_seconds())
    assert until == incident.opened_at.strftime("%H:%M:%S")
    job = world.job()
    assert job.accounting[Bucket.UNACCOUNTED] == round((incident.opened_at - failed_at).total_seconds() * 1e6)
    assert job.accounted_until is not None
    assert timedelta(microseconds=sum(job.accounting.values())) == job.accounted_until - job.created_at


async def test_a_recovery_is_dated_by_what_ranks_say_and_not_by_when_it_is_heard(world: World) -> None:
    world.submit()
    await world.running()
    await world.train(10)
    world.kill_rank(world.team()[1])
    await world.until(lambda: world.job().state == JobState.RUNNING and world.job().generation == 2)
    now = world.now.timestamp()
    for agent in world.team():
        agent.stamp = lambda step: now + 0.01 * step
    for _ in range(3):
        await world.train(1)
    (incident,) = world.incidents()
    assert incident.from_step is not None
    assert incident.reached_step is not None
    assert incident.restored_at is not None
    assert incident.closed_at is not None
    assert incident.restored_at.timestamp() == pytest.approx(now + 0.01 * (incident.from_step + 1))
    assert incident.closed_at.timestamp() == pytest.approx(
        now + 0.01 * max(incident.reached_step, incident.from_step + 1)
    )
    spent = world.job().accounting
    phases = (incident.restore_seconds, incident.rework_seconds)
    assert [spent.get("restore", 0), spent.get("rework", 0)] == [
        pytest.approx((phase or 0) * 1e6, abs=2) for phase in phases
    ]


async def test_a_recovery_that_a_failure_ended_during_an_absence_does_not_overlap_the_next_incident(
    world: World,
) -> None:
    """If a rank fails right after a recovery while no control plane runs, the recovery's incident ends at this failure.

    The two incidents do not overlap. In the test, no rank reports the times of its steps.
    """
    world.submit()
    await world.running()
    await world.train(5)
    world.kill_rank(world.team()[0])
    await world.until(lambda: world.job().generation == 2 and world.job().state == JobState.RUNNING)
    restarted_at, before = world.now, world.job().accounting
    world.now += timedelta(seconds=3)
    world.complete_steps(9)
    world.kill_rank(world.team()[1])
    failed_at = world.now
    world.now += timedelta(minutes=2)
    world.operator.advance(timedelta(minutes=2))
    world.start_server()
    await world.until(lambda: len(world.incidents()) == 2)
    first, second = sorted(world.incidents(), key=lambda each: each.failed_at)
    assert restarted_at < failed_at == second.failed_at
    assert (first.restored_at, first.closed_at) == (failed_at, failed_at)
    detected = (first.detect_seconds or 0) + (second.detect_seconds or 0)
    spent = world.job().accounting
    assert spent[Bucket.DETECT] + spent[Bucket.UNACCOUNTED] == pytest.approx(detected * 1e6, abs=2)
    assert spent[Bucket.UNACCOUNTED] >= 120e6, "nobody watched the job for two minutes after the failure"
    for bucket in (Bucket.QUEUE, Bucket.PROVISION, Bucket.START, Bucket.REPLACE):
        assert world.job().accounting[bucket] == before[bucket]


async def test_a_waiting_job_has_finished_every_step_that_it_has_committed(tmp_path: Path) -> None:
    """The ranks commit steps that no agent reports before a node is lost. The survivors' slots show the steps."""
    with closing(World(tmp_path, nodes=2, spares=0, max_size=2)) as world:
        world.submit(nodes=2)
        await world.running()
        await world.train(2)
        survivor, lost = world.team()
        survivor.is_deaf = lost.is_deaf = True
        world.complete_steps(5)
        world.terminate(lost)
        assert survivor.job is not None
        assert survivor.run is not None
        order = Prepare(job=survivor.job, run=survivor.run, generation=Generation(2), parent=Generation(1))
        survivor.handle(order)
        survivor.is_deaf = False
        await world.until(lambda: world.job().committed_step == 6)
        assert (world.job().state, world.job().boundary) == (JobState.PREPARING, 6)

"""`everstep local fault …` parses its arguments into faults and prints the effect of each fault."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from infra.local_cloud import fault_commands
from infra.local_cloud.fault_kinds import (
    AnyFault,
    Capacity,
    Effect,
    KillRank,
    Partition,
    SlowBoot,
    SpotWarning,
    Terminate,
    Throttle,
    kinds,
    name_of,
)
from infra.local_cloud.faults import Lognormal
from infra.local_cloud.injector import Injector
from infra.local_cloud.roles import Aim, RoleJob, RoleShard


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> list[AnyFault]:
    faults: list[AnyFault] = []

    def inject(fault: AnyFault) -> Effect:
        faults.append(fault)
        return Effect(fault=name_of(fault), target="i-1", did="it [did] so", facts={"pid": 7})

    job = RoleJob(
        name="long",
        nodes=("i-a", "i-b"),
        ranks_per_node=2,
        committed_step=3,
        shards=(RoleShard(rank=0, holders=("i-a", "i-b")),),
    )
    cluster = SimpleNamespace(
        inject=inject,
        clear_faults=lambda name: [f"{name} is over"],
        aim=lambda: Aim(lambda: [job], lambda: {"i-a", "i-b"}),
    )
    monkeypatch.setattr(fault_commands, "open_cluster", lambda _: cluster)
    return faults


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["kill-rank"], KillRank()),
        (["kill-rank", "i-5", "--rank", "3"], KillRank(target="i-5", rank=3)),
        (["partition", "2", "--separate-from", "aws,peers"], Partition(target="2", separate_from="aws,peers")),
        (["spot-warning", "--after", "5", "--action", "stop"], SpotWarning(after=5, action="stop")),
        (["kill-rank", "job 0 rank 3"], KillRank(target="i-b", rank=3)),
        (["throttle", "--share", "0.5", "--service", "ec2"], Throttle(share=0.5, service="ec2")),
        (["capacity", "--count", "4"], Capacity(count=4)),
        (["slow-boot", "--delay", "7"], SlowBoot(delay=7.0)),
        (["slow-boot", "--delay", '{"kind":"lognormal","median_seconds":20}'], SlowBoot(delay=Lognormal(20))),
    ],
)
def test_words_become_a_fault(injected: list[AnyFault], words: list[str], fault: AnyFault) -> None:
    answer = CliRunner().invoke(fault_commands.app, words)
    assert answer.exit_code == 0, answer.output
    assert injected == [fault]


def test_every_fault_has_a_command_with_help_for_all_that_it_takes() -> None:
    for name, kind in kinds().items():
        told = CliRunner().invoke(fault_commands.app, [name, "--help"], env={"COLUMNS": "200"})
        assert told.exit_code == 0
        for field in kind.__struct_fields__:
            option = "target" if field == "target" else f"--{field.replace('_', '-')}"
            assert option in told.output, name


def test_json_is_what_the_fault_did(injected: list[AnyFault]) -> None:
    answer = CliRunner().invoke(fault_commands.app, ["kill-agent", "-o", "json"])
    assert json.loads(answer.stdout) == {
        "fault": "kill-agent",
        "target": "i-1",
        "did": "it [did] so",
        "facts": {"pid": 7},
    }
    assert len(injected) == 1


def test_a_role_may_be_several(injected: list[AnyFault]) -> None:
    answer = CliRunner().invoke(fault_commands.app, ["terminate", "job 0 shard 0", "-o", "json"])
    assert injected == [Terminate(target="i-a"), Terminate(target="i-b")]
    assert len(answer.stdout.splitlines()) == 2


def test_a_play_says_whom_a_role_meant(injected: list[AnyFault], tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text(
        '[{"at_seconds": 0, "fault": "terminate", "target": "job 0 node 1"}, {"at_seconds": 0, "fault": '
        '"terminate", "target": "1"}]'
    )
    told = [
        json.loads(line)
        for line in CliRunner().invoke(fault_commands.app, ["play", str(path), "-o", "json"]).stdout.splitlines()
    ]
    assert injected == [Terminate(target="i-b"), Terminate(target="1")]
    assert [line.get("Role") for line in told] == ["job 0 node 1", None]


@pytest.mark.parametrize(
    "words",
    [["maintenance", "--code", "flood"], ["throttle", "--share", "2"], ["slow-boot", "--delay", "soon"], ["flood"]],
)
def test_nonsense_is_a_wrong_command(injected: list[AnyFault], words: list[str]) -> None:
    assert CliRunner().invoke(fault_commands.app, words).exit_code == 2
    assert injected == []


def test_a_script_that_is_printed_can_be_played(
    injected: list[AnyFault], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "script.json"
    waited: list[float] = []
    monkeypatch.setattr(fault_commands, "pause", waited.append)
    words = ["script", "--seed", "9", "--minutes", "2", "--nodes", "3"]
    path.write_text(CliRunner().invoke(fault_commands.app, words).stdout)
    answer = CliRunner().invoke(fault_commands.app, ["play", str(path), "-o", "json"])
    assert answer.exit_code == 0, answer.output
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    assert len(injected) == sum("Effect" in line for line in lines) > 5
    assert lines[-1]["Cleared"] == "all"
    assert max(waited) > 100, "it waits for each moment"


def test_the_injector_has_a_method_for_each_fault() -> None:
    assert not [name for name in kinds() if not callable(getattr(Injector, f"_{name.replace('-', '_')}", None))]

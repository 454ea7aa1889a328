"""Fault scripts: made, written, read, played."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from infra.local_cloud.errors import FaultRefused
from infra.local_cloud.fault_kinds import AnyFault, Effect, KillRank, Partition, SlowBoot, name_of
from infra.local_cloud.fault_script import Moment, encode, generate, play, read
from infra.local_cloud.faults import Uniform


def made(seed: int = 1, *, minutes: float = 10, has_namespaces: bool = True) -> list[Moment]:
    return generate(seed=seed, minutes=minutes, nodes=7, has_namespaces=has_namespaces)


def test_a_seed_is_a_script() -> None:
    assert encode(made()) == encode(made())
    assert encode(made()) != encode(made(2))


def test_a_script_is_in_order_uses_every_kind_alike_and_ends_clean() -> None:
    moments = made()
    assert [moment.at_seconds for moment in moments] == sorted(moment.at_seconds for moment in moments)
    assert moments[-1] == Moment(at_seconds=moments[-1].at_seconds)
    counts = Counter(name_of(moment.fault) for moment in moments if moment.fault)
    assert sum(counts.values()) >= 40
    assert min(counts.values()) >= 4
    assert max(counts.values()) - min(counts.values()) <= 1
    assert {"kill-rank", "kill-agent", "terminate", "kill-control-plane", "partition", "slow-network", "hang"} <= set(counts)


def test_what_lasts_is_cleared_some_seconds_later() -> None:
    moments = made()
    for name in ("partition", "hang", "throttle"):
        began = [moment.at_seconds for moment in moments if moment.fault and name_of(moment.fault) == name]
        ended = [moment.at_seconds for moment in moments if moment.clears == name]
        assert len(began) == len(ended)
        assert all(any(4 <= end - begin <= 20.1 for end in ended) for begin in began)


def test_without_namespaces_no_line_is_touched() -> None:
    names = {name_of(moment.fault) for moment in made(has_namespaces=False) if moment.fault}
    assert not names & {"partition", "slow-network"}


def test_a_script_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    moments = [*made(), Moment(at_seconds=9999, fault=SlowBoot(delay=Uniform(1, 2)))]
    path.write_bytes(encode(moments))
    assert read(path) == moments


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no fault script"),
        ("{}", "is no list"),
        ('["kill-rank"]', "line 1"),
        ('[{"fault": "kill-rank"}]', "line 1"),
        ('[{"at_seconds": 1, "fault": "clear"}, {"at_seconds": 1, "fault": "kill-all"}]', "line 2"),
        ('[{"at_seconds": -1, "fault": "kill-rank"}]', "line 1"),
        ('[{"at_seconds": 1, "fault": "kill-rank", "rank": -1}]', "line 1"),
        ('[{"at_seconds": 1, "fault": "kill-rank", "force": true}]', "line 1"),
    ],
)
def test_what_is_no_script_is_refused_before_anything_happens(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(FaultRefused, match=words):
        read(path)


def test_a_play_does_everything_at_its_time_and_goes_on_after_a_refusal() -> None:
    happened: list[tuple[float, object]] = []
    now = 0.0

    def wait_until(seconds: float) -> None:
        nonlocal now
        now = seconds

    def inject(fault: AnyFault) -> Effect:
        if isinstance(fault, Partition):
            raise FaultRefused("no network of its own")
        happened.append((now, fault))
        return Effect(fault=name_of(fault), target="i-1", did="it did")

    told: list[str] = []
    moments = [Moment(at_seconds=1, fault=Partition()), Moment(at_seconds=2, fault=KillRank(rank=3)), Moment(at_seconds=3, clears="hang")]
    play(
        moments,
        inject=inject,
        clear=lambda name: happened.append((now, name)),
        wait_until=wait_until,
        tell=lambda moment, outcome: told.append(type(outcome).__name__),
    )
    assert happened == [(2, KillRank(rank=3)), (3, "hang")]
    assert told == ["FaultRefused", "Effect", "NoneType"]


def test_a_script_may_be_yaml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "script.yaml"
    path.write_text("- at_seconds: 2\n  fault: kill-rank\n  rank: 3\n- {at_seconds: 1, fault: clear, name: hang}\n")
    assert read(path) == [Moment(at_seconds=1, clears="hang"), Moment(at_seconds=2, fault=KillRank(rank=3))]

"""Tests how fault scripts are generated, written as text, parsed and executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from pathlib import Path

import pytest
from msgspec.structs import replace

from infra.local_cloud.errors import FaultRefused
from infra.local_cloud.fault_kinds import AnyFault, Effect, Hang, KillRank, Partition, SlowBoot, Terminate, name_of
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
    assert {"kill-rank", "kill-agent", "terminate", "kill-control-plane", "partition", "slow-network", "hang"} <= set(
        counts
    )


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
    moments = [
        *made(),
        Moment(at_seconds=9998, fault=Partition(target="job 0 node 2"), within_seconds=3, lasts_seconds=0.0),
        Moment(at_seconds=9999, fault=SlowBoot(delay=Uniform(1, 2))),
    ]
    path.write_bytes(encode(moments))
    assert read(path) == moments


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no fault script"),
        ("{}", "is not a list"),
        ('["kill-rank"]', "line 1"),
        ('[{"fault": "kill-rank"}]', "line 1"),
        ('[{"at_seconds": 1, "fault": "clear"}, {"at_seconds": 1, "fault": "kill-all"}]', "line 2"),
        ('[{"at_seconds": -1, "fault": "kill-rank"}]', "line 1"),
        ('[{"at_seconds": 1, "fault": "kill-rank", "rank": -1}]', "line 1"),
        ('[{"at_seconds": 1, "fault": "kill-rank", "force": true}]', "line 1"),
        (
            '[{"at_seconds": 1, "fault": "clear"}, {"at_seconds": 1, "fault": "hang", "target": "job 1"}]',
            'line 2 .* write an instance id.* "job 0 node 2"',
        ),
        ('[{"at_seconds": 1, "fault": "hang", "target": "job 0 rank 1", "rank": 1}]', "line 1 .* remove `rank`"),
        (
            '[{"at_seconds": 1, "fault": "kill-rank", "lasts_seconds": 3}]',
            "line 1 .* kill-rank is not a lasting fault: remove `lasts_seconds`",
        ),
        ('[{"at_seconds": 1, "fault": "hang", "lasts_seconds": -3}]', "line 1 .*lasts_seconds"),
        ('[{"at_seconds": 1, "fault": "hang", "within_seconds": "long"}]', "line 1 .*within_seconds"),
        ('[{"at_seconds": 1, "fault": "clear", "lasts_seconds": 3}]', "line 1 .*lasts_seconds"),
    ],
)
def test_what_is_no_script_is_refused_before_anything_happens(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(FaultRefused, match=words):
        read(path)


class Stage:
    """Plays fault scripts on a virtual clock, and refuses some attempts to inject a fault."""

    def __init__(self, refused: Container[int] = (), takes_seconds: float = 0.0) -> None:
        self.now = 0.0
        self.happened: list[tuple[float, object]] = []
        self.told: list[tuple[Moment, object]] = []
        self._tries = 0
        self._refused = refused
        """Numbers of the calls of `inject` that fail with `FaultRefused`, counted from 0."""
        self._takes_seconds = takes_seconds

    def wait_until(self, seconds: float) -> float:
        self.now = max(self.now, seconds)
        return self.now

    def inject(self, fault: AnyFault) -> Effect:
        self._tries += 1
        if self._tries - 1 in self._refused:
            raise FaultRefused("not now")
        self.happened.append((round(self.now, 3), fault))
        self.now += self._takes_seconds
        return Effect(fault=name_of(fault), target="i-1", did="it did")

    def play(self, *moments: Moment, aim: Callable[[AnyFault], list[AnyFault]] = lambda fault: [fault]) -> None:
        play(
            moments,
            aim=aim,
            inject=self.inject,
            clear=lambda name: self.happened.append((round(self.now, 3), name)),
            wait_until=self.wait_until,
            report=lambda moment, outcome: self.told.append((moment, outcome)),
        )

    def outcomes(self) -> list[str]:
        return [type(outcome).__name__ for _, outcome in self.told]


def test_a_play_does_everything_at_its_time_and_goes_on_after_a_refusal() -> None:
    stage = Stage(refused={0})
    stage.play(
        Moment(at_seconds=1, fault=Partition()),
        Moment(at_seconds=2, fault=KillRank(rank=3)),
        Moment(at_seconds=3, clears="hang"),
    )
    assert stage.happened == [(2, KillRank(rank=3)), (3, "hang")]
    assert stage.outcomes() == ["FaultRefused", "Effect", "NoneType"]


def test_what_is_refused_is_tried_again_within_its_time_and_others_do_not_wait_for_it() -> None:
    stage = Stage(refused={0, 2})
    stage.play(Moment(at_seconds=1, fault=Terminate(), within_seconds=2), Moment(at_seconds=1.2, fault=KillRank()))
    assert stage.happened == [(1.2, KillRank()), (1.6, Terminate())]
    assert stage.outcomes() == ["Effect", "Effect"]


def test_what_is_refused_for_too_long_is_told_once() -> None:
    stage = Stage(refused=range(100))
    stage.play(Moment(at_seconds=1, fault=Terminate(), within_seconds=2))
    assert stage.outcomes() == ["FaultRefused"]
    assert 2.5 < stage.now <= 3
    # The first fault takes so long that it ends after the second fault's time.
    stage = Stage(refused={1}, takes_seconds=10)
    stage.play(Moment(at_seconds=1, fault=KillRank()), Moment(at_seconds=2, fault=Terminate(), within_seconds=2))
    assert stage.outcomes() == ["Effect", "FaultRefused"]


def test_what_lasts_is_cleared_so_long_after_it_struck() -> None:
    stage = Stage(refused={0, 1})
    stage.play(
        Moment(at_seconds=1, fault=Hang(), within_seconds=2, lasts_seconds=4),
        Moment(at_seconds=5.2, clears="partition"),
    )
    assert stage.happened == [(1.6, Hang()), (5.2, "partition"), (5.6, "hang")]
    stage = Stage(refused=range(100))
    stage.play(Moment(at_seconds=1, fault=Hang(), lasts_seconds=4))
    assert stage.happened == []
    assert stage.outcomes() == ["FaultRefused"]


def test_a_fault_of_several_is_done_to_each_and_not_again_to_whom_it_was_done() -> None:
    def aim(fault: AnyFault) -> list[AnyFault]:
        return [replace(fault, target=target) for target in ("i-a", "i-b")] if isinstance(fault, Terminate) else [fault]

    moment = Moment(at_seconds=1, fault=Terminate(target="job 0 shard 0"), within_seconds=5)
    stage = Stage()
    stage.play(moment, aim=aim)
    assert stage.happened == [(1, Terminate(target="i-a")), (1, Terminate(target="i-b"))]
    stage = Stage(refused={0})
    stage.play(moment, aim=aim)
    assert stage.happened == [(1, Terminate(target="i-b"))]
    assert stage.outcomes() == ["FaultRefused", "Effect"]
    stage = Stage(refused={0, 1})
    stage.play(moment, aim=aim)
    assert stage.happened == [(1.3, Terminate(target="i-a")), (1.3, Terminate(target="i-b"))]


def test_nobody_who_is_meant_is_looked_for_again() -> None:
    looks = 0

    def aim(fault: AnyFault) -> list[AnyFault]:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise FaultRefused("nobody")
        return [fault]

    stage = Stage()
    stage.play(Moment(at_seconds=1, fault=Terminate(), within_seconds=5), aim=aim)
    assert stage.happened == [(1.6, Terminate())]
    assert stage.outcomes() == ["Effect"]


def test_a_script_may_be_yaml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "script.yaml"
    path.write_text("- at_seconds: 2\n  fault: kill-rank\n  rank: 3\n- {at_seconds: 1, fault: clear, name: hang}\n")
    assert read(path) == [Moment(at_seconds=1, clears="hang"), Moment(at_seconds=2, fault=KillRank(rank=3))]

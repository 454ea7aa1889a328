"""Tests faults of the local AWS that last for some time, such as throttling, and their random decisions."""

from __future__ import annotations

import msgspec
import pytest

from infra.local_cloud.faults import Conditions, Faults, Lognormal, Uniform


def delays(conditions: Conditions, *, seed: int = 3, count: int = 200) -> list[float]:
    faults = Faults(conditions, seed=seed)
    return [faults.boot_delay() for _ in range(count)]


def test_equal_seeds_give_equal_boots() -> None:
    conditions = Conditions(boot_delay_seconds=Uniform(1, 3))
    assert delays(conditions) == delays(conditions)
    assert delays(conditions) != delays(conditions, seed=4)


def test_boots_take_what_their_distribution_says() -> None:
    assert set(delays(Conditions(boot_delay_seconds=1.5))) == {1.5}
    uniform = delays(Conditions(boot_delay_seconds=Uniform(1, 3)))
    assert all(1 <= delay <= 3 for delay in uniform)
    assert min(uniform) < 1.2
    assert max(uniform) > 2.8
    lognormal = sorted(delays(Conditions(boot_delay_seconds=Lognormal(20, sigma=1.0, longest_seconds=60)), count=1000))
    assert 17 < lognormal[500] < 23, "the median"
    assert lognormal[-1] == 60, "none takes longer"
    assert lognormal[840] > 2 * lognormal[500], "a long tail: e to the sigma, at one sigma"


def test_more_of_one_thing_does_not_move_another() -> None:
    conditions = Conditions(boot_delay_seconds=Uniform(0, 9), throttle={"ec2": 0.5})
    quiet, busy = Faults(conditions, seed=1), Faults(conditions, seed=1)
    for _ in range(7):
        busy.is_throttled("ec2")
    assert [quiet.boot_delay() for _ in range(5)] == [busy.boot_delay() for _ in range(5)]


def test_a_share_of_calls_is_throttled_of_the_services_that_are_named() -> None:
    faults = Faults(Conditions(throttle={"ec2": 0.3}), seed=5)
    assert 250 < sum(faults.is_throttled("ec2") for _ in range(1000)) < 350
    assert not any(faults.is_throttled("autoscaling") for _ in range(100))
    assert not any(faults.is_throttled("") for _ in range(100))


def test_events_are_lost_doubled_and_late_as_often_as_they_should_be() -> None:
    faults = Faults(Conditions(event_drop_share=0.2, event_double_share=0.5, event_delay_seconds=Uniform(1, 2)), seed=6)
    copies = [faults.event_delays() for _ in range(1000)]
    lost, once, twice = (sum(len(copy) == count for copy in copies) for count in (0, 1, 2))
    assert 160 < lost < 240
    assert 350 < twice < 450
    assert lost + once + twice == 1000
    assert all(1 <= delay <= 2 for copy in copies for delay in copy)
    assert Faults(Conditions()).event_delays() == [0.0]


def test_a_change_wakes_who_waits() -> None:
    woken: list[int] = []
    faults = Faults(Conditions(), changed=lambda: woken.append(1))
    faults.replace(Conditions(capacity={"p5.48xlarge": 2}))
    assert faults.conditions.capacity == {"p5.48xlarge": 2}
    assert woken == [1]


@pytest.mark.parametrize(
    "text",
    [
        '{"boot_delay_seconds": -1}',
        '{"boot_delay_seconds": {"kind": "uniform", "low_seconds": 3, "high_seconds": 1}}',
        '{"throttle": {"ec2": 2}}',
        '{"throttle": {"iam": 1}}',
        '{"capacity": {"a": -1}}',
        '{"speed": 1}',
        "[]",
    ],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Conditions)


def test_conditions_survive_the_wire() -> None:
    conditions = Conditions(
        boot_delay_seconds=Lognormal(20), capacity={"a": 1}, event_delay_seconds=Uniform(0, 1), throttle={"ec2": 0.3}
    )
    assert msgspec.json.decode(msgspec.json.encode(conditions), type=Conditions) == conditions

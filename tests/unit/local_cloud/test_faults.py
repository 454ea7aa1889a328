"""Conditions, and the chance in them."""

from __future__ import annotations

import msgspec
import pytest

from infra.local_cloud.faults import Conditions, Faults


def test_equal_seeds_give_equal_boots() -> None:
    conditions = Conditions(boot_delay_seconds=1, boot_jitter_seconds=2)
    one, other = Faults(conditions, seed=3), Faults(conditions, seed=3)
    delays = [one.boot_delay() for _ in range(10)]
    assert delays == [other.boot_delay() for _ in range(10)]
    assert len(set(delays)) == 10
    assert all(1 <= delay < 3 for delay in delays)
    assert Faults(Conditions(boot_delay_seconds=1)).boot_delay() == 1


def test_a_change_wakes_who_waits() -> None:
    woken: list[int] = []
    faults = Faults(Conditions(), changed=lambda: woken.append(1))
    faults.replace(Conditions(capacity={"p5.48xlarge": 2}))
    assert faults.conditions.capacity == {"p5.48xlarge": 2}
    assert woken == [1]


@pytest.mark.parametrize("text", ['{"boot_delay_seconds": -1}', '{"capacity": {"a": -1}}', '{"speed": 1}', "[]"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Conditions)


def test_conditions_survive_the_wire() -> None:
    conditions = Conditions(boot_delay_seconds=0.25, capacity={"a": 1})
    assert msgspec.json.decode(msgspec.json.encode(conditions), type=Conditions) == conditions

"""Tests values that a script logs before their device has computed them.

The fake device computes them as late as possible.
"""

from __future__ import annotations

import math

import pytest
import torch

from everstep.protocol.ids import Generation, Step
from everstep.protocol.rank_messages import Logged
from everstep.training.device_numbers import DeviceNumbers
from everstep.training.errors import SessionMisuse
from everstep.training.metrics import MetricRing
from tests.unit.training.test_cuda_copier import FakeDevice


class OnOther(torch.Tensor):
    """A tensor of the script's other device."""

    def get_device(self) -> int:
        return 1


class Script:
    """A script that logs values. `sent` receives the records that are sent to the agent."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.host: list[torch.Tensor] = []
        self.other = FakeDevice()
        self.sent: list[Logged] = []
        self.now = 100.0
        self.ring = MetricRing(Generation(1), self.sent.append, now=lambda: self.now)
        self.limit()

    def limit(self, **options: int) -> None:
        """Start again without pending records, and with these options of `DeviceNumbers`."""
        self.numbers = DeviceNumbers(self.ring, self.device_of, lambda: self.now, **options)

    def device_of(self, tensor: torch.Tensor):
        if any(tensor is each for each in self.host):
            return None
        return self.other if isinstance(tensor, OnOther) else self.device

    def there(self) -> list[tuple[int, dict[str, float]]]:
        """Return the records in the ring of logged values, in order."""
        self.ring.flush()
        return [(record.step, record.values) for message in self.sent for record in message.records]

    def waits(self) -> list[str]:
        return [name for name, _ in self.device.calls if name == "synchronize"]


@pytest.fixture
def script():
    made = Script()
    yield made
    made.ring.close()


def test_nothing_waits_and_the_value_is_that_of_its_place_in_the_stream(script: Script) -> None:
    loss = torch.tensor(0.0, requires_grad=True)
    script.device.do(script.device.training, "forward", lambda: loss.data.fill_(2.5))
    script.numbers.add(Step(3), {"loss": loss, "lr": 0.1})
    script.device.change_behind_what_is_queued(loss.data)
    script.now = 200.0
    script.numbers.settle()
    assert script.there() == [], "the device has not come so far"
    script.device.catch_up()
    script.numbers.settle()
    assert script.there() == [(3, {"loss": 2.5, "lr": 0.1})], "as it was when it was logged, not -1"
    assert script.sent[0].records[0].at_seconds == 100.0
    assert script.waits() == []


def test_records_stay_in_the_order_in_which_they_were_logged(script: Script) -> None:
    for step in (1, 2):
        script.numbers.add(Step(step), {"loss": torch.tensor(float(step))})
        script.numbers.add(Step(step), {"lr": 0.5})
    assert script.there() == []
    script.device.catch_up()
    script.numbers.add(Step(3), {"lr": 0.25})
    assert script.there() == [
        (1, {"loss": 1.0}),
        (1, {"lr": 0.5}),
        (2, {"loss": 2.0}),
        (2, {"lr": 0.5}),
        (3, {"lr": 0.25}),
    ]


def test_a_graph_that_is_captured_contains_nothing_of_what_is_logged(script: Script) -> None:
    """A script that captures a CUDA graph may log values. The graph contains no operation for them and stays valid.

    A copy, a recorded event or a query of an event would invalidate the capture. The logged values are computed only
    when the graph is replayed.
    """
    script.numbers.add(Step(1), {"loss": torch.tensor(1.0)})
    script.device.catch_up()
    before = list(script.device.calls)
    script.device.is_capturing_now = True
    script.numbers.add(Step(2), {"loss": torch.tensor(2.0)})
    script.numbers.settle()
    assert (script.there(), script.device.calls) == ([], before)
    script.device.is_capturing_now = False
    script.numbers.settle()
    assert script.there() == [(1, {"loss": 1.0})]
    script.ring.flush()
    script.numbers.add(Step(3), {"lr": 0.5})
    script.ring.flush()
    assert sum(message.dropped_count for message in script.sent) == 1


def test_no_event_is_queried_while_one_of_two_devices_captures_a_graph(script: Script) -> None:
    script.numbers.add(Step(1), {"loss": torch.tensor(1.0), "other": torch.tensor(2.0).as_subclass(OnOther)})
    for device in (script.device, script.other):
        device.catch_up()
    script.other.is_capturing_now = True
    script.numbers.settle()
    assert script.there() == []
    script.other.is_capturing_now = False
    script.numbers.settle()
    assert script.there() == [(1, {"loss": 1.0, "other": 2.0})]


def test_what_lies_on_the_host_is_given_on_at_once(script: Script) -> None:
    value = torch.tensor(3)
    script.host.append(value)
    script.numbers.add(Step(1), {"x": value, "y": 2})
    assert script.there() == [(1, {"x": 3.0, "y": 2.0})]
    assert script.device.calls == [], "and asks nothing of the device"


def test_kinds_and_shapes_of_numbers(script: Script) -> None:
    values = {
        "nan": torch.tensor(math.nan),
        "half": torch.tensor([[0.5]], dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "yes": torch.tensor(True),
    }
    script.numbers.add(Step(1), values)
    script.numbers.close()
    ((_, found),) = script.there()
    assert math.isnan(found.pop("nan"))
    assert found == {"half": 0.5, "count": 7.0, "yes": 1.0}


@pytest.mark.parametrize("value", [torch.zeros(2), torch.tensor(1j)])
def test_what_is_not_one_number_is_refused_at_once(script: Script, value: torch.Tensor) -> None:
    with pytest.raises(SessionMisuse, match=r"log\(loss=…\)"):
        script.numbers.add(Step(1), {"fine": torch.tensor(1.0), "loss": value})
    assert script.device.calls == []


def test_a_device_that_is_far_behind_costs_records_and_no_time(script: Script) -> None:
    script.limit(place_count=3)
    for step in range(5):
        script.numbers.add(Step(step), {"a": torch.tensor(float(step)), "b": torch.tensor(1.0)})
    assert script.waits() == []
    script.device.catch_up()
    script.numbers.settle()
    assert script.there() == [(0, {"a": 0.0, "b": 1.0})]
    assert sum(message.dropped_count for message in script.sent) == 4
    script.numbers.add(Step(9), {"a": torch.tensor(9.0)})
    script.device.catch_up()
    script.numbers.settle()
    assert script.there()[-1] == (9, {"a": 9.0}), "places are free again"


def test_a_place_is_not_given_again_before_it_was_read(script: Script) -> None:
    script.limit(place_count=2)
    for step in range(20):
        script.numbers.add(Step(step), {"a": torch.tensor(float(step))})
        if step % 2:
            script.device.catch_up()
            script.numbers.settle()
    assert script.there() == [(step, {"a": float(step)}) for step in range(20)]
    assert [size for name, size in script.device.calls if name == "pinned"] == [16], "memory is pinned once"


def test_host_records_behind_a_device_that_stands_still_have_a_limit(script: Script) -> None:
    script.limit(place_count=3)
    script.numbers.add(Step(0), {"a": torch.tensor(0.0)})
    for step in range(1, 6):
        script.numbers.add(Step(step), {"lr": 1.0})
    script.numbers.close()
    assert [step for step, _ in script.there()] == [0, 1, 2]
    assert sum(message.dropped_count for message in script.sent) == 3


def test_closing_waits_for_the_rest(script: Script) -> None:
    script.numbers.add(Step(1), {"loss": torch.tensor(1.5)})
    script.numbers.close()
    assert script.there() == [(1, {"loss": 1.5})]
    assert script.waits() == ["synchronize"]


def test_a_device_that_has_failed_holds_up_no_close(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script.numbers.add(Step(1), {"loss": torch.tensor(1.5)})
    script.numbers.add(Step(2), {"lr": 1.0})

    def fail(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("tests.unit.training.test_cuda_copier.FakeEvent.synchronize", fail)
    script.numbers.close()
    assert script.there() == []
    assert sum(message.dropped_count for message in script.sent) == 2


def test_more_numbers_at_once_than_there_are_places_have_more_places(script: Script) -> None:
    script.limit(place_count=2)
    script.numbers.add(Step(1), {"a": torch.tensor(1.0)})
    many = {name: torch.tensor(float(number)) for number, name in enumerate("abcde")}
    script.numbers.add(Step(2), many)
    script.device.catch_up()
    script.numbers.settle()
    assert script.there() == [(1, {"a": 1.0}), (2, {name: float(value) for name, value in many.items()})]

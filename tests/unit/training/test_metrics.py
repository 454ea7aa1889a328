from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from everstep.protocol.codec import decode, encode
from everstep.protocol.ids import Generation, Step
from everstep.protocol.rank_messages import Logged
from everstep.training.errors import SessionMisuse
from everstep.training.metrics import MetricRing, numbers


def test_a_full_ring_drops_and_counts() -> None:
    sent: list[Logged] = []
    ring = MetricRing(Generation(3), sent.append, capacity=2)
    for step in range(5):
        ring.add(Step(step), {"loss": float(step)})
    ring.close()
    (message,) = sent
    assert message.generation == 3
    assert [record.step for record in message.records] == [0, 1]
    assert message.dropped_count == 3


def test_nothing_is_sent_of_nothing() -> None:
    sent: list[Logged] = []
    ring = MetricRing(Generation(1), sent.append)
    ring.flush()
    ring.close()
    assert sent == []


def test_what_was_sent_is_not_sent_again() -> None:
    sent: list[Logged] = []
    ring = MetricRing(Generation(1), sent.append)
    ring.add(Step(1), {"loss": 1.0})
    ring.flush()
    ring.add(Step(2), {"loss": 2.0})
    ring.close()
    assert [record.step for message in sent for record in message.records] == [1, 2]


def test_a_loss_is_logged_as_it_comes_out_of_the_model() -> None:
    """pytest makes torch's warning about a scalar that requires grad an error."""
    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    known, later = numbers({"loss": loss, "column": loss.reshape(1, 1), "half": torch.tensor(0.5, dtype=torch.bfloat16)})
    assert later == {}
    assert known == {
        "loss": 6.0,
        "column": 6.0,
        "half": 0.5,
    }
    loss.backward()  # the graph is still there


@pytest.mark.parametrize("value", [3, True, 2.5, np.float32(0.5), np.int64(3), Decimal("0.5"), torch.tensor(3)])
def test_anything_that_is_a_number_is_logged(value: Any) -> None:
    assert numbers({"x": value}) == ({"x": float(value)}, {})


def test_a_diverging_loss_is_seen() -> None:
    sent: list[Logged] = []
    ring = MetricRing(Generation(1), sent.append)
    ring.add(Step(1), numbers({"loss": torch.tensor(math.nan), "norm": -math.inf})[0])
    ring.close()
    (record,) = decode(encode(sent[0]), Logged).records
    assert math.isnan(record.values["loss"])
    assert record.values["norm"] == -math.inf


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(3), r"shape \[3\]; log takes one real number"),
        (torch.zeros(0), r"shape \[0\]"),
        (torch.tensor(1j), "complex64"),
        (np.zeros(3), "ndarray is not a real number"),
        (None, "NoneType is not a real number"),
        ("high", "str is not a real number"),
        (10**400, "int is not a real number"),
        (1j, "complex is not a real number"),
    ],
)
def test_what_is_not_one_number_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(SessionMisuse, match=rf"log\(loss=…\): .*{words}"):
        numbers({"loss": value})


def test_names_that_everstep_logs_itself_are_refused() -> None:
    with pytest.raises(SessionMisuse, match="everstep/step_seconds"):
        numbers({"everstep/step_seconds": 1.0})

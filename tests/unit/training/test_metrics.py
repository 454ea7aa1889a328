from __future__ import annotations

import math
import threading
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from everstep.protocol.codec import decode, encode
from everstep.protocol.ids import Generation, Step
from everstep.protocol.rank_messages import MAX_LOGGED_BYTES, MAX_RANK_MESSAGE_BYTES, Logged, LogRecord
from everstep.training import metrics
from everstep.training.errors import SessionMisuse
from everstep.training.metrics import MESSAGE_BYTES, MetricRing, check_values, numbers


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


def test_a_signal_handler_may_log_and_close_while_a_record_is_added() -> None:
    sent: list[Logged] = []
    is_handled = False

    def now() -> float:
        nonlocal is_handled
        if not is_handled:
            is_handled = True
            ring.add(Step(2), {"loss": 2.0})
            ring.close()
        return 0.0

    ring = MetricRing(Generation(1), sent.append, capacity=1, now=now)
    ring.add(Step(1), {"loss": 1.0})
    assert [record.step for message in sent for record in message.records] == [2]
    ring.add(Step(3), {"loss": 3.0})
    ring.flush()
    assert [record.step for message in sent for record in message.records] == [2, 1], "nothing is lost that was there"
    assert [message.dropped_count for message in sent] == [0, 1]


def test_a_signal_handler_may_close_while_the_first_record_begins_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Logged] = []
    ring = MetricRing(Generation(1), sent.append)
    start = threading.Thread.start

    def handled(thread: threading.Thread) -> None:
        ring.close()
        start(thread)
        thread.join()

    monkeypatch.setattr(threading.Thread, "start", handled)
    ring.add(Step(1), {"loss": 1.0})
    assert [record.step for message in sent for record in message.records] == [1]


def many(count: int) -> dict[str, float]:
    return {f"layers.{number}.self_attn.q_proj.weight/grad_norm": float(number) for number in range(count)}


def test_a_second_of_many_values_goes_in_messages_that_an_agent_takes() -> None:
    sent: list[Logged] = []
    ring = MetricRing(Generation(1), sent.append)
    for step in range(25):
        ring.add(Step(step), many(1000))
    ring.flush()
    ring.close()
    assert [record.step for message in sent for record in message.records] == list(range(25))
    assert all(len(encode(message)) <= MESSAGE_BYTES + 64 < MAX_RANK_MESSAGE_BYTES for message in sent)
    assert not any(message.dropped_count for message in sent)


def test_of_what_waits_no_more_is_measured_than_what_is_taken_and_the_first_that_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, measured = metrics.encoded_bytes, []
    monkeypatch.setattr(metrics, "encoded_bytes", lambda record: measured.append(record.step) or size(record))
    records = [
        LogRecord(step=Step(step), values=many(100_000 if step == 119 else 1000), at_seconds=0.0) for step in range(120)
    ]
    pieces, left, too_large_count = metrics.divide(records)
    taken = [record for piece in pieces for record in piece]
    assert (taken + left, too_large_count) == (records, 0), (
        "one that has no place in any message is counted when its turn comes"
    )
    assert measured == list(range(len(taken) + 1))
    assert metrics.divide(records[119:]) == ([], [], 1)


def test_what_an_agent_does_not_take_in_a_second_waits_and_at_the_end_is_counted() -> None:
    sent: list[Logged] = []
    ring = MetricRing(Generation(1), sent.append)
    for step in range(120):
        ring.add(Step(step), many(1000))
    ring.flush()
    first = [record.step for message in sent for record in message.records]
    assert first == list(range(len(first)))
    assert sum(len(encode(message)) for message in sent) <= MAX_LOGGED_BYTES
    ring.close()
    steps = [record.step for message in sent for record in message.records]
    assert steps == list(range(2 * len(first)))
    assert sum(message.dropped_count for message in sent) == 120 - len(steps) > 0


def test_a_record_that_no_message_holds_is_counted() -> None:
    sent: list[Logged] = []
    ring = MetricRing(Generation(1), sent.append)
    ring.add(Step(1), many(10_000))
    ring.add(Step(2), {"é" * 255: 1.0})
    ring.close()
    (message,) = sent
    assert ([record.step for record in message.records], message.dropped_count) == ([2], 1)


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
    """A script logs a loss that still requires grad, and torch gives no warning.

    (Pytest turns warnings into errors.)
    """
    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    known, later = numbers(
        {"loss": loss, "column": loss.reshape(1, 1), "half": torch.tensor(0.5, dtype=torch.bfloat16)}
    )
    assert later == {}
    assert known == {
        "loss": 6.0,
        "column": 6.0,
        "half": 0.5,
    }
    loss.backward()  # `log` has not freed the autograd graph


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


def test_a_name_that_no_message_can_hold_is_refused() -> None:
    with pytest.raises(SessionMisuse, match=r"log\('\\ud800'=…\): a name must be valid"):
        numbers({"\ud800": 1.0})


def test_names_that_everstep_logs_itself_are_refused() -> None:
    with pytest.raises(SessionMisuse, match="everstep/step_seconds"):
        numbers({"everstep/step_seconds": 1.0})


def test_check_values_does_not_read_values_of_a_device() -> None:
    check_values({"loss": torch.empty((), device="meta"), "lr": 0.1})  # Reading a tensor of this device raises.
    with pytest.raises(SessionMisuse, match=r"log\(loss=…\): .*shape \[2\]"):
        check_values({"loss": torch.empty(2, device="meta")})

"""Tests the agent's own log, whose size in memory is limited."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from everstep.protocol.plan import ObjectReference
from worker.__main__ import start_log
from worker.agent.own_log import LIMIT_BYTES, OwnLog


class Store:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put_bytes(self, reference: ObjectReference, data: bytes) -> object:
        self.objects[reference.key] = data
        return reference


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("worker", logging.INFO, __file__, 1, text, None, None)


def test_the_newest_lines_are_kept() -> None:
    own = OwnLog()
    for number in range(30):
        own.handle(record(f"{number} " + "x" * (LIMIT_BYTES // 20)))
    lines = own.text().decode().splitlines()
    assert lines[-1].startswith("29 ")
    assert lines[0].startswith("11 ")
    assert len(own.text()) <= LIMIT_BYTES


def test_a_line_longer_than_all_there_is_does_not_hurt() -> None:
    own = OwnLog()
    own.handle(record("y" * (2 * LIMIT_BYTES)))
    own.handle(record("short"))
    assert own.text() == b"short\n"


def test_both_logs_are_put_and_a_missing_one_is_left_out(tmp_path: Path) -> None:
    own, store, place = OwnLog(), Store(), ObjectReference(bucket="b", key="evidence/i-1/")
    own.handle(record("hello"))
    own.put(store, place, tmp_path / "shim.log")
    assert store.objects == {"evidence/i-1/agent.log": b"hello\n"}
    (tmp_path / "shim.log").write_text("reaped 7\n")
    own.put(store, place, tmp_path / "shim.log")
    assert store.objects["evidence/i-1/shim.log"] == b"reaped 7\n"


@pytest.mark.security
def test_what_others_send_forges_no_line_of_the_agents_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    own = start_log()
    logging.getLogger("worker").warning("the rank said %s", "a\x1b[2J\nE worker: forged\x85\u2028")
    expected = r"the rank said a\x1b[2J\x0aE worker: forged\x85\u2028"
    for text in (own.text().decode(), capsys.readouterr().err):
        assert [line.split(" W worker: ")[1] for line in text.splitlines()] == [expected]

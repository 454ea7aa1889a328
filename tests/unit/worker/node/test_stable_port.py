"""An agent stores its port on disk, so that the next agent uses the same port.

In some tests, the disk is full or the file is invalid.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.node.stable_port import KeptPort


def test_the_next_agent_knows_it(tmp_path: Path) -> None:
    assert KeptPort(tmp_path / "port").read() == 0
    KeptPort(tmp_path / "port").keep(4711)
    assert KeptPort(tmp_path / "port").read() == 4711
    KeptPort(tmp_path / "port").keep(4712)
    assert KeptPort(tmp_path / "port").read() == 4712
    assert [path.name for path in tmp_path.iterdir()] == ["port"]


def test_what_is_known_is_not_written_again(tmp_path: Path) -> None:
    """The agent does not write an unchanged port again, and therefore does not fail on a full disk."""
    port = KeptPort(tmp_path / "port")
    port.keep(4711)
    before = (tmp_path / "port").stat()
    port.keep(4711)
    assert (tmp_path / "port").stat() == before


@pytest.mark.parametrize("written", [b"", b"port", b"\xff", b"70000", b"-1"])
def test_what_is_no_port_counts_as_none(tmp_path: Path, written: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """An agent finds an empty port file, which a power failure can leave behind.

    It treats the file as if it did not exist.
    """
    (tmp_path / "port").write_bytes(written)
    port = KeptPort(tmp_path / "port")
    assert port.read() == 0
    port.keep(4711)
    assert caplog.text.count("earlier agent cannot be read") == 1
    assert KeptPort(tmp_path / "port").read() == 4711


def test_a_port_that_was_given_is_kept_unread(tmp_path: Path) -> None:
    KeptPort(tmp_path / "port").keep(4711)
    before = (tmp_path / "port").stat()
    KeptPort(tmp_path / "port").keep(4711)
    assert (tmp_path / "port").stat() == before


def test_a_disk_that_takes_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    KeptPort(tmp_path / "file" / "port").keep(4711)
    assert "port 4711 cannot be stored" in caplog.text

"""What an agent is started with: what is missing or wrong is said before anything begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.__main__ import settings


def arguments(state: Path, url: str = "http://127.0.0.1:8000") -> list[str]:
    return ["--control-plane-url", url, "--instance-id", "i-1", "--address", "127.0.0.2", "--state-dir", str(state), "--memory-bytes", "1000"]


def test_what_is_given_counts(tmp_path: Path) -> None:
    found = settings(arguments(tmp_path / "state"))
    assert (found.node_id, found.address, found.memory_bytes, found.control_plane_urls) == ("i-1", "127.0.0.2", 1000, ("http://127.0.0.1:8000",))
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("url", ["", "http://[", "127.0.0.1:8000", "ws://127.0.0.1", "http://127.0.0.1:none"])
def test_a_url_that_is_none_is_refused_before_anything_is_made(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings(arguments(tmp_path / "state", url))
    assert f"--control-plane-url {url!r} is not an http or https URL" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()

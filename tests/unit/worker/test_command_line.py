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


def test_figures_for_prometheus_are_off_or_on_loopback_unless_said_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert settings(arguments(tmp_path)).metrics_address is None
    assert settings([*arguments(tmp_path), "--metrics-port", "9500"]).metrics_address == ("127.0.0.1", 9500)
    assert settings([*arguments(tmp_path), "--metrics-port", "9500", "--metrics-address", "10.0.0.1"]).metrics_address == ("10.0.0.1", 9500)
    with pytest.raises(SystemExit):
        settings([*arguments(tmp_path), "--metrics-port", "65536"])
    assert "--metrics-port 65536 is not a port" in capsys.readouterr().err


def test_the_log_is_for_people_unless_said_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert settings(arguments(tmp_path)).log_format == "text"
    assert settings([*arguments(tmp_path), "--log-format", "json"]).log_format == "json"
    monkeypatch.setenv("EVERSTEP_LOG_FORMAT", "xml")
    with pytest.raises(SystemExit):
        settings(arguments(tmp_path))
    assert "EVERSTEP_LOG_FORMAT 'xml' is none of text, json" in capsys.readouterr().err

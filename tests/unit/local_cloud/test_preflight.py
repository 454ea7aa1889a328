"""Tests the messages to a user whose machine cannot run a local cluster."""

from __future__ import annotations

import pytest

from infra.local_cloud import preflight
from infra.local_cloud.errors import PreflightFailed


def test_this_machine_passes() -> None:
    preflight.check(1)


def test_another_system_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.platform, "system", lambda: "Darwin")
    with pytest.raises(PreflightFailed, match="needs Linux"):
        preflight.check(1)


def test_another_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.platform, "machine", lambda: "aarch64")
    with pytest.raises(PreflightFailed, match="nodes need x86_64 processors; this node has aarch64"):
        preflight.check(1)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(preflight.NEEDED, "no_such_module", "worker")
    with pytest.raises(PreflightFailed, match="no_such_module is not installed: pip install"):
        preflight.check(1)


def test_too_little_memory_is_said_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_memory_bytes", lambda: 100 * 1024**2)
    with pytest.raises(PreflightFailed, match=r"100 MiB.*4 nodes need .*MiB"):
        preflight.check(4)


def test_nodes_share_half_of_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_memory_bytes", lambda: 8 * 1024**3)
    assert preflight.memory_bytes_per_node(4) == 1024**3


def test_what_stands_in_the_way_of_namespaces_is_said_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight.network, "obstacle", lambda: "network namespaces need root")
    preflight.check(1)
    with pytest.raises(PreflightFailed, match="cannot work here: network namespaces need root; use --network loopback"):
        preflight.check(1, has_namespaces=True)


def test_a_missing_program_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.network.os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        preflight.network.shutil, "which", lambda program: None if program == "tc" else f"/sbin/{program}"
    )
    assert preflight.network.obstacle() == "`tc` is missing: install iproute2"
    monkeypatch.setattr(preflight.network.os, "geteuid", lambda: 1000)
    assert preflight.network.obstacle() == "network namespaces need root"

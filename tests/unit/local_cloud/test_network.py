"""The counters of links, while instances end."""

from __future__ import annotations

from typing import Any

import pytest

from infra.local_cloud.errors import StartFailed
from infra.local_cloud.network import Network


class FakeNetwork(Network):
    """A network without links in the kernel. Each instance that `ends` names ends while its counters are read."""

    def __init__(self, *instance_ids: str, ends: tuple[str, ...] = ()) -> None:
        self._links: Any = dict.fromkeys(instance_ids)
        self._ends = ends

    def counters(self, instance_id: str) -> dict[str, int]:
        if instance_id in self._ends:
            del self._links[instance_id]
        if instance_id not in self._links or instance_id == "i-broken":
            raise StartFailed("Cannot find device")
        return {"sent_bytes": 1}


def test_an_instance_that_ends_meanwhile_has_no_counters() -> None:
    assert FakeNetwork("i-1", "i-2", ends=("i-1",)).all_counters() == {"i-2": {"sent_bytes": 1}}


def test_the_failure_to_read_a_running_instance_is_an_error() -> None:
    with pytest.raises(StartFailed):
        FakeNetwork("i-broken").all_counters()

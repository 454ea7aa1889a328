"""Tests the NUMA memory nodes on which an agent requests the pages of slots.

A fake kernel answers the requests, except in one test that uses the real kernel.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.shm.numa import DEFAULT, PREFERRED, UNKNOWN, gpu_nodes, near, set_policy


class Kernel:
    """A fake kernel that stores the memory policy of one thread."""

    def __init__(self, mode: int | None = DEFAULT) -> None:
        self.mode = mode
        self.asked: list[int | None] = []

    def policy(self, node: int | None) -> int | None:
        self.asked.append(node)
        before = self.mode
        if before in (DEFAULT, PREFERRED):
            self.mode = DEFAULT if node is None else PREFERRED
        return before


def test_pages_come_from_the_node_for_as_long_as_they_are_made() -> None:
    kernel = Kernel()
    with near(3, kernel.policy):
        assert (kernel.asked, kernel.mode) == ([3], PREFERRED)
    assert (kernel.asked, kernel.mode) == ([3, None], DEFAULT)


def test_a_failure_leaves_nothing_changed() -> None:
    kernel = Kernel()
    with pytest.raises(OSError, match="full"), near(3, kernel.policy):
        raise OSError("full")
    assert kernel.mode == DEFAULT


@pytest.mark.parametrize("mode", [None, 3], ids=["refused", "somebody has chosen to interleave"])
def test_what_is_refused_or_set_already_is_left_as_it_is(mode: int | None) -> None:
    kernel = Kernel(mode)
    with near(3, kernel.policy):
        pass
    assert (kernel.asked, kernel.mode) == ([3], mode)


def test_without_a_node_the_kernel_is_not_asked() -> None:
    kernel = Kernel()
    with near(None, kernel.policy):
        pass
    assert kernel.asked == []


def test_the_real_thread_has_the_policy_that_it_had() -> None:
    """The agent requests memory node 0 from the real kernel, and then restores the thread's earlier memory policy.

    Every machine has memory node 0. A container may refuse the request.
    """
    before = set_policy(None)
    with near(0):
        inside = set_policy(0)
    assert inside == (None if before is None else PREFERRED)
    assert set_policy(None) == before


def machine(folder: Path, *, nodes: int, gpus: dict[str, str | None]) -> tuple[Path, Path, Path]:
    for number in range(nodes):
        (folder / "node" / f"node{number}").mkdir(parents=True)
    for gpu, near_node in gpus.items():
        (folder / "gpus" / gpu).mkdir(parents=True)
        (folder / "pci" / gpu).mkdir(parents=True)
        if near_node is not None:
            (folder / "pci" / gpu / "numa_node").write_text(near_node)
    return folder / "gpus", folder / "pci", folder / "node"


def test_each_gpu_by_its_number_has_the_node_that_the_kernel_tells(tmp_path: Path) -> None:
    gpus = {"0000:a0:1d.0": "1\n", "0000:10:1c.0": "0\n", "0000:20:1c.0": "-1\n", "0000:90:1c.0": None}
    assert gpu_nodes(*machine(tmp_path, nodes=2, gpus=gpus)) == (0, UNKNOWN, UNKNOWN, 1)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, {"0000:10:1c.0": "0\n"}), (2, {}), (0, {"0000:10:1c.0": "0\n"})])
def test_with_one_node_or_no_gpu_there_is_nothing_to_choose(
    tmp_path: Path, nodes: int, gpus: dict[str, str | None]
) -> None:
    assert gpu_nodes(*machine(tmp_path, nodes=nodes, gpus=gpus)) == ()

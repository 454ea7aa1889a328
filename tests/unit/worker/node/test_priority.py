"""Tests the CPU priorities of threads that compute for a long time, and of sessions (groups of processes).

A process raises the priority of its whole session while ranks wait for its work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from worker.node import priority
from worker.node.priority import AGENT_NICENESS, before_other_sessions, end_first_without_memory, work_as_ranks_do


def test_a_thread_that_works_long_has_the_priority_of_the_ranks() -> None:
    def niceness_of_a_thread(above: int) -> tuple[int, int]:
        os.setpriority(os.PRIO_PROCESS, 0, above)
        before = os.getpriority(os.PRIO_PROCESS, 0)
        work_as_ranks_do()
        return before, os.getpriority(os.PRIO_PROCESS, 0)

    own = os.getpriority(os.PRIO_PROCESS, 0)
    may_rise = os.geteuid() == 0
    with ThreadPoolExecutor(1) as thread:
        before, after = thread.submit(niceness_of_a_thread, -10 if may_rise else own).result()
    assert after == (0 if may_rise else before)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own, "the thread's alone"


PRINTS = """
import sys
from pathlib import Path
from worker.node.priority import before_other_sessions, lead_own_session
if "leads" in sys.argv:
    lead_own_session()
with before_other_sessions():
    print(Path("/proc/self/autogroup").read_text().split()[-1])
print(Path("/proc/self/autogroup").read_text().split()[-1])
"""


@pytest.mark.parametrize(
    ("is_first", "arguments", "during"),
    [(True, [], AGENT_NICENESS), (True, ["leads"], AGENT_NICENESS), (False, ["leads"], AGENT_NICENESS), (False, [], 0)],
    ids=["first_of_its_session", "first_and_says_so", "of_a_script", "of_a_script_and_not_for_itself"],
)
def test_a_session_of_its_own_goes_before_others_for_as_long_as_ranks_wait_for_it(
    is_first: bool, arguments: list[str], during: int
) -> None:
    if not priority.AUTOGROUP.exists() or os.geteuid() != 0:
        pytest.skip("the kernel groups no sessions, or this process may not raise one")
    child = [sys.executable, "-c", PRINTS, *arguments]
    if not is_first:  # the shell is the first process of the session, and the child is a later one
        child = ["sh", "-c", '"$@"; true', "sh", *child]
    ended = subprocess.run(child, start_new_session=True, check=True, capture_output=True, text=True)
    assert [int(line) for line in ended.stdout.split()] == [during, 0]


@pytest.mark.parametrize("text", [None, "", "what"])
def test_a_kernel_that_groups_no_sessions_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    file = tmp_path / "autogroup"
    if text is not None:
        file.write_text(text)
        file.chmod(0o400)
    monkeypatch.setattr(os, "getsid", lambda _pid: os.getpid())
    with pytest.raises(ZeroDivisionError), before_other_sessions(file):
        raise ZeroDivisionError
    assert not file.exists() or file.read_text() == (text or "")


def test_a_rank_is_ended_before_services_when_memory_is_exhausted(tmp_path: Path) -> None:
    end_first_without_memory(tmp_path / "none" / "oom_score_adj")
    end_first_without_memory(tmp_path / "oom_score_adj")
    assert (tmp_path / "oom_score_adj").read_text() == "500"

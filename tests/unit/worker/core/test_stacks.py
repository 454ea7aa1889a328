"""Tests how the stacks of a rank are summarized, and when two samples of stacks count as equal."""

from __future__ import annotations

from worker.core.stacks import MAX_TEXT_BYTES, Look, StackFrame, ThreadStack, compare, describe

MAIN = ThreadStack("MainThread", (StackFrame("all_reduce", "distributed.py", 7), StackFrame("main", "train.py", 3)))
OTHER = ThreadStack("copier", (StackFrame("wait", "threading.py", 355),))


def test_the_main_thread_comes_first_with_its_innermost_frame() -> None:
    text = "MainThread\n    all_reduce (distributed.py:7)\n    main (train.py:3)\ncopier\n    wait (threading.py:355)"
    assert describe([OTHER, MAIN]) == text
    assert describe([ThreadStack("", ())]) == "(a thread without a name)"


def test_a_text_is_cut_at_a_frame() -> None:
    deep = ThreadStack("MainThread", tuple(StackFrame("f" * 50, "ö.py", line) for line in range(10_000)))
    text = describe([deep])
    assert len(text.encode()) <= MAX_TEXT_BYTES + 8
    assert text.endswith(")\n    …")


def test_the_same_stacks_are_compared_with_the_first_look_that_found_them() -> None:
    before, same, cpu = compare(None, Look("a", 10.0, 5.0))
    assert (same, cpu) == (0.0, 0.0)
    before, same, cpu = compare(before, Look("a", 40.0, 5.5))
    assert (same, cpu) == (30.0, 0.5)
    before, same, cpu = compare(before, Look("a", 70.0, 6.0))
    assert (same, cpu) == (60.0, 1.0)
    before, same, cpu = compare(before, Look("b", 80.0, 6.0))
    assert (before, same, cpu) == (Look("b", 80.0, 6.0), 0.0, 0.0)

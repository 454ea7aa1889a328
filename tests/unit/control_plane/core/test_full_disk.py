"""Tests when the control plane reports a disk as full, and when it stops the report."""

from __future__ import annotations

import pytest

from control_plane.core.full_disk import LEAST_FREE_BYTES, QUIET_SECONDS, DiskRecord, failed, is_full, stored

FAILED = failed(None, 100.0, "full")


def test_a_failure_is_remembered_with_when_it_began() -> None:
    assert DiskRecord(since=100.0, failed_at=100.0, words="full") == FAILED
    later = stored(FAILED)
    assert later is not None
    assert later.has_stored
    again = failed(later, 120.0, "still full")
    assert again == DiskRecord(since=100.0, failed_at=120.0, words="still full")
    assert stored(None) is None


@pytest.mark.parametrize(
    ("record", "now", "free_bytes", "expected"),
    [
        (None, 100.0, 0, False),
        (FAILED, 100.0 + QUIET_SECONDS, None, True),
        (stored(FAILED), 99.0 + QUIET_SECONDS, None, True),
        (stored(FAILED), 100.0 + QUIET_SECONDS, None, False),
        (stored(FAILED), 100.0 + QUIET_SECONDS, LEAST_FREE_BYTES, False),
        (stored(FAILED), 100.0 + QUIET_SECONDS, LEAST_FREE_BYTES - 1, True),
    ],
)
def test_it_is_full_until_a_write_succeeds_and_no_other_fails(
    record: DiskRecord | None, now: float, free_bytes: int | None, expected: bool
) -> None:
    assert is_full(record, now, free_bytes) is expected

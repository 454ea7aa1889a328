"""The automatic interval of checkpoints respects its two bounds for any measured upload.

Neither the modelled slowdown nor the modelled rate of uploads exceeds its bound.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.protocol.ids import Step
from worker.core.checkpoint_schedule import CheckpointSchedule, automatic_interval

SECONDS = st.floats(0.001, 1e5)
SHARES = st.floats(0.0, 1.0)
BOUNDS = st.floats(0.0001, 1.0)
BYTES = st.integers(0, 10**13)
RATES = st.one_of(st.just(0.0), st.floats(1.0, 1e11))
ROUNDING = 1 + 1e-9


@given(SECONDS, SHARES, BYTES, BOUNDS, RATES)
def test_overhead_and_rate_stay_within_their_bounds_and_uploads_do_not_overlap(
    upload: float, share: float, node_bytes: int, bound: float, rate: float
) -> None:
    cost = upload * share
    interval = automatic_interval(upload, cost, node_bytes, max_overhead=bound, max_bytes_per_second=rate)
    assert cost / (interval - cost) <= bound * ROUNDING if cost else interval > 0
    assert interval >= upload
    assert not rate or node_bytes / interval <= rate * ROUNDING
    bounds = (upload, cost * (1 + bound) / bound, node_bytes / rate if rate else 0.0)
    assert interval in bounds, "no longer than one of the bounds requires"


@given(SECONDS, SECONDS, SHARES, BOUNDS)
def test_a_longer_upload_never_shortens_the_interval(first: float, second: float, share: float, bound: float) -> None:
    short, long = sorted((first, second))
    intervals = [
        automatic_interval(each, each * share, 0, max_overhead=bound, max_bytes_per_second=0.0)
        for each in (short, long)
    ]
    assert intervals == sorted(intervals)


@given(
    BOUNDS,
    st.lists(
        st.tuples(st.floats(0.0, 1000.0), st.integers(0, 50), st.booleans(), st.booleans(), st.booleans()), max_size=40
    ),
)
def test_after_any_observations_the_interval_keeps_the_bound_for_the_measured_cost(
    bound: float, story: list[tuple[float, int, bool, bool, bool]]
) -> None:
    schedule, now, boundary, persist, stored = CheckpointSchedule(max_overhead=bound), 0.0, 0, -1, -1
    for seconds, steps, is_marked, is_uploading, is_stored in story:
        now, boundary = now + seconds, boundary + steps
        persist = boundary if is_marked else persist
        stored = persist if is_stored else stored
        schedule = schedule.observe(
            now,
            boundary=Step(boundary),
            persist=Step(persist),
            is_uploading=is_uploading,
            stored=Step(stored),
            node_bytes=0,
        )
        interval, cost, upload = schedule.present_interval, schedule.cost_seconds, schedule.upload_seconds
        assert interval is not None
        assert upload is None or 0.0 <= cost <= upload <= interval
        assert upload is None or cost <= bound * (interval - cost) * ROUNDING + 1e-9
        assert schedule.due_at == schedule.begun_at + interval

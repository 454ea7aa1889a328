"""Shapes of the API: metrics and their data points."""

from __future__ import annotations

from datetime import datetime

from control_plane.api.schemas.common import LoggedNumber, Shape


class Metric(Shape):
    """One name under which rank 0 logs."""

    metric_name: str
    last_step: int
    last_time: datetime
    last_value: LoggedNumber
    """What is not finite is the text NaN, Infinity or -Infinity on the wire."""


class ListMetricsResponse(Shape):
    """What a job has logged: at most 256 names, so that there are no pages."""

    metrics: list[Metric]
    dropped_count: int
    """Steps whose values were lost on the way, because more was logged than could be taken, and values of more names than a job may have."""


class MetricDataResult(Shape):
    """One metric as columns: the first entry of each is the first point, and so on, in order of steps.

    A point is one step or a span of them.
    """

    metric_name: str
    steps: list[int]
    """The first step of each point that has a value."""
    last_steps: list[int]
    times: list[float]
    """When the last value of each point was logged, seconds since 1970."""
    counts: list[int]
    """Values in each point."""
    minimums: list[LoggedNumber]
    """Of the finite values, as means and maximums; NaN where there are none."""
    means: list[LoggedNumber]
    maximums: list[LoggedNumber]
    last_values: list[LoggedNumber]
    """The last value of each point, finite or not.

    What is not finite is the text NaN, Infinity or -Infinity on the wire.
    """
    minimum_node_ids: list[str]
    """Of what Everstep measures on every node (names that begin with everstep/): the node of each minimum; empty for what the script logs. There the
    mean and the last value are the median of the nodes, and the counts count nodes. A point that was made while one
    node alone was heard is of rank 0's node, and has an empty name."""
    maximum_node_ids: list[str]
    """Likewise of each maximum."""


class GetMetricDataResponse(Shape):
    """What a job has logged, by metric."""

    metric_data_results: list[MetricDataResult]

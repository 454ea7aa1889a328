"""API models: metrics and their data points."""

from __future__ import annotations

from datetime import datetime

from control_plane.api.schemas.common import Changes, LoggedNumber, Shape
from control_plane.db.metrics import SeriesKind


class Metric(Shape):
    """A metric of a job: a name under which rank 0 logs values, or under which Everstep measures values on nodes."""

    metric_name: str
    last_step: int
    last_time: datetime
    last_value: LoggedNumber
    """The newest value. NaN, Infinity and -Infinity are sent as text."""


class ListMetricsResponse(Shape):
    """All metrics of a job. There are at most 256 names, so the response has no pages."""

    metrics: list[Metric]
    dropped_count: int
    """Number of values that are lost.

    Values are lost if the script logs too fast, or under more names than the limit.
    """


class MetricSeries(Shape):
    """The values of one node or of one rank."""

    node_id: str | None = None
    rank: int | None = None
    values: list[LoggedNumber]
    """For each point: the value, or NaN without a value.

    If the point covers several steps, the value is their mean.
    """


class MetricDataResult(Shape):
    """One metric in columns: entry i of each list describes point i. Points are in the order of steps.

    A point covers one step or a span of steps.
    """

    metric_name: str
    steps: list[int]
    """For each point: the first step with a value."""
    last_steps: list[int]
    times: list[float]
    """For each point: the time of the last value, in seconds since 1970."""
    counts: list[int]
    """For each point: the number of values."""
    minimums: list[LoggedNumber]
    """For each point: the minimum of the finite values, or NaN without a finite value.

    Means and Maximums use the same values.
    """
    means: list[LoggedNumber]
    maximums: list[LoggedNumber]
    last_values: list[LoggedNumber]
    """For each point: the last value, finite or not.

    NaN, Infinity and -Infinity are sent as text.
    """
    minimum_node_ids: list[str]
    """The node that measured each minimum.

    Only for metrics named everstep/…, which Everstep measures on every node.

    For these metrics, Means and LastValues contain the median of the nodes' values, and Counts the number of nodes. The
    id is empty for a point that contains only the value of rank 0's node. The list is empty for metrics of the script.
    """
    maximum_node_ids: list[str]
    """The node that measured each maximum. The rules of MinimumNodeIds apply."""
    series_kind: SeriesKind | None = None
    """The value of Series with which a request returns this metric's series: Node or Rank. Absent if none is stored."""
    series: list[MetricSeries] | None = None
    """Only with Series: the values of each node or rank, for at most 64 nodes or ranks."""
    kept_point_count: int | None = None
    """Number of points at the beginning of the earlier response that the client keeps, because they are unchanged.

    The client drops the remaining points of the earlier response, and appends the points of this response. Only in
    incremental responses.
    """


class GetMetricDataResponse(Shape):
    """Values of a job's metrics, by metric."""

    metric_data_results: list[MetricDataResult]
    """The metrics. An incremental response omits the metrics whose points did not change."""
    changes: Changes | None = None
    """Only with ChangesSince. Its field Removed names the metrics that have no points any more."""


class LossCurve(Shape):
    """The training loss of one job in a few points."""

    run_id: str
    metric_name: str
    steps: list[int]
    values: list[LoggedNumber]
    """For each step: the logged value. NaN, Infinity and -Infinity are sent as text."""


class BatchGetLossCurvesResponse(Shape):
    """The loss curves of the requested jobs that log a loss."""

    loss_curves: list[LossCurve]

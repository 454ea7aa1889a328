"""API models: reports of time, cost and incidents over a time range."""

from __future__ import annotations

from datetime import datetime

from control_plane.api.schemas.common import OfRun, Shape
from control_plane.core.observed.nodes import Cause
from control_plane.core.reports import IncidentKind


class ReportIncidents(Shape):
    """Sums over incidents of one kind: failures, planned stops or drills."""

    count: int
    """Number of incidents whose failure is in the time range."""
    recovered_count: int
    """Number of these incidents from which training has recovered."""
    recovery_seconds: float
    """Total recovery time of the incidents from which training has recovered.

    The recovery of an incident lasts from the failure until training has repeated the lost steps.
    """
    recomputed_steps: int
    cost_usd: float | None
    """Cost of the jobs' nodes during the recoveries, for the part of each recovery inside the time range.

    Absent if no fleet has a price.
    """


class ReportFigures(Shape):
    """Time, cost and incidents of one project, fleet, job or part of the time range, or of the whole report."""

    accounting_seconds: dict[str, float]
    """Time of the jobs by accounting bucket, as in AccountingSeconds of DescribeTrainingJob."""
    productive_seconds: float
    """Training time: the accounting bucket `train` of AccountingSeconds."""
    ettr_ratio: float | None
    """Training time ÷ time during which the jobs had nodes, over all jobs together. Absent if no job had nodes."""
    ettr_with_queue_ratio: float | None
    """Training time ÷ all time of the jobs, including queue and pauses. Absent if no job has any time."""
    node_seconds: float
    """Working time of the jobs' nodes, summed over nodes."""
    rank_seconds: float
    """NodeSeconds × ranks per node. With one rank per GPU, this is GPU time."""
    unpriced_node_seconds: float
    """Part of NodeSeconds that CostUsd leaves out, because the fleet has no price."""
    cost_usd: float | None
    """Cost of NodeSeconds. It excludes idle nodes. Absent if no fleet has a price."""
    failures: ReportIncidents
    """Incidents that neither a drill nor a planned stop caused."""
    planned_stops: ReportIncidents
    """Incidents that do not count as failures, because a stop of the ranks was requested.

    The request followed from AWS's notice, a person's request about a node, a change of the number of nodes, or a pause
    that did not succeed.
    """
    drills: ReportIncidents
    """Incidents that drills caused. No other count contains them."""
    mttf_seconds: float | None
    """Mean time to failure: time in the accounting buckets train and stall ÷ number of failures.

    Absent without a failure.
    """
    mttr_seconds: float | None
    """Mean recovery time of failures, as in RecoverySeconds. Absent if training recovered from no failure."""
    idle_node_seconds: dict[str, float]
    """Time of nodes that work for no job, by node state, summed over nodes. Only in Total, Buckets and Fleets."""
    spare_cost_usd: float | None
    """Cost of the spares in IdleNodeSeconds. Absent if no fleet has a price."""
    other_idle_cost_usd: float | None
    """Cost of the other nodes in IdleNodeSeconds: joining, held, rebooting and draining nodes.

    Absent if no fleet has a price.
    """


class ReportBucket(Shape):
    """Time, cost and incidents in one bucket: a part of the time range, for example one day."""

    start_time: datetime
    end_time: datetime
    figures: ReportFigures


class ProjectReport(Shape):
    """Time, cost and incidents of one project's jobs."""

    project: str
    figures: ReportFigures


class FleetReport(Shape):
    """Time, cost and incidents of one fleet, including its idle nodes."""

    fleet_name: str
    figures: ReportFigures


class JobReport(OfRun):
    """Time, cost and incidents of one job."""

    project: str
    fleet_name: str
    figures: ReportFigures


class CauseReport(Shape):
    """The incidents with one cause."""

    cause: Cause
    kind: IncidentKind
    incidents: ReportIncidents


class Report(Shape):
    """Time, cost and incidents of all matching jobs and fleets over a time range.

    Total equals the sum of Buckets, and the sum of Fleets. Without idle nodes, it also equals the sum of Projects, and
    the sum of Jobs and OtherJobs. Deleted jobs and fleets are not included. Costs use the current price of each fleet.
    """

    start_time: datetime
    """The requested begin, rounded down to a full hour."""
    end_time: datetime
    """The requested end, rounded up to a full hour."""
    total: ReportFigures
    buckets: list[ReportBucket]
    """Time, cost and incidents in each part of the time range, oldest first, without gaps."""
    projects: list[ProjectReport]
    """Figures of each project, the most expensive project first."""
    fleets: list[FleetReport]
    """Figures of each fleet, the most expensive fleet first.

    A job counts for the fleet in which it runs now or ran last.
    """
    jobs: list[JobReport]
    """Figures of at most MaxJobs jobs, the most expensive job first."""
    other_jobs: ReportFigures | None
    """Sums over the jobs that Jobs leaves out. Absent if Jobs contains all jobs."""
    job_count: int
    causes: list[CauseReport]
    """Incidents by cause, the most frequent cause first."""

"""The list of training jobs: filters, order, pages, and the changes since an earlier response."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from fastapi import Query
from pydantic import AwareDatetime
from sqlalchemy.orm import Session

from control_plane.api import page_tokens, views
from control_plane.api.auth import Reader
from control_plane.api.changes import compared, digest_of
from control_plane.api.deps import (
    ChangesSince,
    MaxResults,
    NextToken,
    Services,
    ServicesDep,
    SortOrder,
    page_of,
)
from control_plane.api.errors import invalid
from control_plane.api.router import Router
from control_plane.api.schemas import jobs as jobs_schemas
from control_plane.core.states import TrainingJobStatus
from control_plane.db import incidents, job_lists
from control_plane.db.job_lists import JobFilter, SortBy
from control_plane.db.jobs import SavedJob
from control_plane.loop import disposition

router = Router(prefix="/v1/training-jobs", tags=["TrainingJobs"])

TAG_KEY_PATTERN = r'^[^"\\\x00-\x1f]{1,256}$'
"""Pattern of tag keys: the characters that are valid in a JSON path in every supported database."""


@router.get("", operation_id="ListTrainingJobs")
def list_training_jobs(
    caller: Reader,
    services: ServicesDep,
    max_results: MaxResults = 100,
    next_token: NextToken = None,
    status_equals: Annotated[
        TrainingJobStatus | None, Query(alias="StatusEquals", description="Only jobs with this status.")
    ] = None,
    name_contains: Annotated[
        str | None, Query(alias="NameContains", max_length=63, description="Only jobs with this text in the name.")
    ] = None,
    fleet_name: Annotated[
        str | None, Query(alias="FleetName", max_length=63, description="Only jobs of this fleet.")
    ] = None,
    project: Annotated[
        str | None, Query(alias="Project", max_length=63, description="Only jobs of this project.")
    ] = None,
    creation_time_after: Annotated[
        AwareDatetime | None, Query(alias="CreationTimeAfter", description="Only jobs created after this time.")
    ] = None,
    creation_time_before: Annotated[
        AwareDatetime | None, Query(alias="CreationTimeBefore", description="Only jobs created before this time.")
    ] = None,
    last_modified_time_after: Annotated[
        AwareDatetime | None,
        Query(alias="LastModifiedTimeAfter", description="Only jobs that changed after this time."),
    ] = None,
    last_modified_time_before: Annotated[
        AwareDatetime | None,
        Query(alias="LastModifiedTimeBefore", description="Only jobs that did not change after this time."),
    ] = None,
    tag_key: Annotated[
        str | None, Query(alias="TagKey", pattern=TAG_KEY_PATTERN, description="Only jobs with a tag of this name.")
    ] = None,
    tag_value: Annotated[str | None, Query(alias="TagValue", max_length=256)] = None,
    sort_by: Annotated[
        SortBy, Query(alias="SortBy", description="The field by which the list is sorted.")
    ] = SortBy.CREATION_TIME,
    sort_order: Annotated[
        SortOrder, Query(alias="SortOrder", description="The direction in which the list is sorted.")
    ] = SortOrder.DESCENDING,
    changes_since: ChangesSince = None,
) -> jobs_schemas.ListTrainingJobsResponse:
    """List training jobs, newest first unless SortBy or SortOrder is set.

    A job must match all filters. With ChangesSince, the response omits jobs whose entry did not change, and names those
    that left the page. Raises ValidationException if TagValue is set without TagKey.
    """
    if tag_value is not None and tag_key is None:
        raise invalid("TagValue", "needs a TagKey")
    if project is not None and caller.project_filter not in (None, project):
        return jobs_schemas.ListTrainingJobsResponse(training_job_summaries=[])
    which = JobFilter(
        status=status_equals,
        name_contains=name_contains,
        fleet_name=fleet_name,
        project=project or caller.project_filter,
        created_after=creation_time_after,
        created_before=creation_time_before,
        modified_after=last_modified_time_after,
        modified_before=last_modified_time_before,
        tag_key=tag_key,
        tag_value=tag_value,
    )
    after = None if next_token is None else _position(next_token, sort_by, sort_order)
    is_ascending = sort_order is SortOrder.ASCENDING
    with services.database.read() as session:
        page = job_lists.page(
            session, which, after=after, limit=max_results + 1, sort_by=sort_by, is_ascending=is_ascending
        )
        shown, more = page_of(page, max_results, lambda job: _place(job, sort_by, sort_order))
        summaries = _summaries(session, services, shown)
    if changes_since is None:
        return jobs_schemas.ListTrainingJobsResponse(training_job_summaries=summaries, next_token=more)
    question = caller.token.id, which, sort_by, sort_order
    before = services.snapshots.find(question, changes_since)
    contents = {each.run_id: digest_of(each.model_dump_json().encode()) for each in summaries}
    return jobs_schemas.ListTrainingJobsResponse(
        training_job_summaries=[
            each for each in summaries if before is None or before.get(each.run_id) != contents[each.run_id]
        ],
        changes=compared(before, contents, services.snapshots.keep(question, contents)),
        next_token=more,
    )


def _summaries(
    session: Session, services: Services, shown: Sequence[SavedJob]
) -> list[jobs_schemas.TrainingJobSummary]:
    """Return the list entries of a page of jobs.

    The number of database queries does not depend on the number of jobs.
    """
    now = services.now()
    standings = disposition.of_jobs(session, shown, services.peers.agents().connected, now.timestamp())
    hit = incidents.counts(session, [job.run_id for job in shown])
    return [views.job_summary(job, now, standings[job.run_id], hit.get(job.run_id, (0, 0))) for job in shown]


def _place(job: SavedJob, sort_by: SortBy, order: SortOrder) -> tuple[str, ...]:
    value, run_id = job_lists.position_of(job, sort_by)
    return sort_by.value, order.value, value.isoformat() if isinstance(value, datetime) else value, run_id


def _position(token: str, sort_by: SortBy, order: SortOrder) -> job_lists.Position:
    """Return the position at which a page token continues the list.

    Raises InvalidRequest if the token belongs to a list with another sort order.
    """
    by, direction, value, run_id = page_tokens.position(
        token,
        page_tokens.text,
        page_tokens.text,
        page_tokens.text if sort_by is SortBy.NAME else page_tokens.moment,
        page_tokens.text,
    )
    if (by, direction) != (sort_by.value, order.value):
        raise invalid("NextToken", f"belongs to a list that is sorted by {by}, {direction}")
    return value, run_id

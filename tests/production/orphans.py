"""Finds what a cluster's jobs have left behind: instances, objects in S3 and rows that nothing refers to."""

from __future__ import annotations

import re
from contextlib import closing
from datetime import datetime, timedelta
from typing import Any, Final

from control_plane.cloud.connection import CloudMode, CloudSettings, Connection
from control_plane.cloud.s3 import S3ServiceStore
from control_plane.core.checkpoints import DEFAULT_TRASH_HOURS
from control_plane.core.orphans import KEPT_SECONDS, PLACE
from control_plane.db import checks
from control_plane.db.session import Database
from control_plane.loop.orphan_keeper import OrphanKeeper
from control_plane.steady_clock import steady_now
from infra.local_cloud.up import BUCKET, FLEET, LocalCluster

KEPT: Final = re.compile(r"(projects/[^/]+/)?sources/|evidence/i-")
"""Keys of objects that belong to no run: users' sources, and the evidence about ended instances."""


def orphans(cluster: LocalCluster, database_url: str) -> list[str]:
    """Return a sentence for each orphan. All jobs must have ended.

    The server's loop `OrphanKeeper` deletes shards that no checkpoint can contain, but only when they are older than
    `KEPT_SECONDS`, and after their time in the trash. The function therefore first runs this loop twice, with clocks
    that are hours and days ahead.
    """
    with closing(Database(database_url)) as database:
        OrphanKeeper(database, _store(cluster), later).delete_due()
        OrphanKeeper(database, _store(cluster), lambda: later() + timedelta(hours=DEFAULT_TRASH_HOURS)).delete_due()
        wrong = list(checks.check(database))
    with closing(cluster.client()) as client:
        nodes = {node["NodeId"] for node in _all(client, "list_nodes", "Nodes", FleetName=FLEET)}
        runs = {job["RunId"] for job in _all(client, "list_training_jobs", "TrainingJobSummaries")}
    wrong += [f"no node describes the instance {each}" for each in sorted(cluster.instances().keys() - nodes)]
    with closing(cluster.aws("s3")) as s3:
        keys = [found["Key"] for found in _all(s3, "list_objects_v2", "Contents", Bucket=BUCKET)]
        uploads = [found["Key"] for found in _all(s3, "list_multipart_uploads", "Uploads", Bucket=BUCKET)]
    return wrong + strange(keys, uploads, runs)


def strange(keys: list[str], uploads: list[str], runs: set[str]) -> list[str]:
    """Return a sentence for each object without a run, each shard without a manifest, and each unfinished upload."""
    assert keys, "the bucket is empty"
    wrong = [f"the upload of {key} was not finished" for key in uploads]
    complete = {_step(key) for key in keys if key.endswith("/manifest.json")}
    for key in keys:
        if not KEPT.match(key) and not any(f"/run={run}/" in key for run in runs):
            wrong.append(f"{key} belongs to no run")
        elif PLACE.search(key) and _step(key) not in complete:
            wrong.append(f"{key} belongs to no checkpoint")
    return wrong


def later() -> datetime:
    """Return a time at which objects without a checkpoint are old enough to be deleted."""
    return steady_now() + timedelta(seconds=3 * KEPT_SECONDS)


def _step(key: str) -> str:
    place = PLACE.search(key)
    return key[: place.end()] if place else key


def _store(cluster: LocalCluster) -> S3ServiceStore:
    settings = CloudSettings(
        mode=CloudMode.LOCAL,
        endpoint_url=cluster.aws_url,
        s3_endpoint_url=cluster.environment().get("AWS_ENDPOINT_URL_S3"),
        keys=cluster.keys,
    )
    return S3ServiceStore(Connection(settings))


def _all(client: Any, operation: str, key: str, **query: Any) -> list[dict[str, Any]]:
    return [item for page in client.get_paginator(operation).paginate(**query) for item in page.get(key, [])]

"""Jobs that keep no step in memory survive a killed rank.

With the strategy `HighFreq`, a job restores its newest checkpoint from S3. With `None`, it starts again from step 0.
"""

from __future__ import annotations

import pytest

from tests.e2e.jobs import Shape, Workplace, assert_identical

ALONE = Shape(nodes=2, copies=1)
MOMENT = "1:8"


@pytest.mark.parametrize(("strategy", "words"), [("HighFreq", "newest checkpoint"), ("None", "from its beginning")])
def test_a_killed_rank_costs_all_steps_since_the_newest_checkpoint(place: Workplace, strategy: str, words: str) -> None:
    request = {"CheckpointConfig": {"Strategy": strategy}}
    job = place.submit(f"compared-{strategy.lower()}", ALONE, steps=12, holds=(MOMENT,), request=request)
    job.reference()
    moment, stored = MOMENT, 0
    if strategy == "None":
        job.wait_standing(moment)
    else:
        moment = job.wait_standing_committed(moment, 1)
        job.wait("a checkpoint", lambda _: job.protection().get("LastCheckpoint"))
        stored = job.protection()["LastCheckpoint"]["Step"]
    assert words in job.protection()["Reason"]
    assert (job.describe()["CommittedStep"] > 0) == (strategy == "HighFreq")
    job.kill_rank(0)
    job.let_go(moment)
    job.wait_ended()
    (incident,) = job.incidents()
    assert incident.get("RestoreSource") == ("s3" if strategy == "HighFreq" else None)
    assert stored <= incident["FromStep"] <= int(moment.split(":")[1])
    assert (incident["FromStep"] == 0) == (strategy == "None")
    assert_identical(job)

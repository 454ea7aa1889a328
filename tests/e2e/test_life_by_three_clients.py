"""The whole life of a job by three clients: boto3, the AWS CLI and the command line.

The programs in examples/lives use only the API's model and the documents.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import Workplace, wait_until
from tests.warm_parent import ROOT

LIVES = ROOT / "examples" / "lives"
LIFE_SECONDS = 350


@pytest.mark.parametrize(
    "program",
    [
        "with_everstep.sh",
        # a short run covers one of the three clients, because all of them call the same operations
        pytest.param("with_boto3.py", marks=pytest.mark.long),
        pytest.param("with_aws_cli.sh", marks=pytest.mark.long),
    ],
)
def test_the_whole_life_of_a_job(place: Workplace, reader: Path, program: str) -> None:
    name = re.sub(r"\W|_", "-", Path(program).stem)
    fleet, group = f"{name}-fleet", f"{name}-group"
    join_token = place.client.create_join_token(FleetName=fleet)["JoinToken"]
    place.cluster.create_group(group, join_token, [place.cluster.endpoint_url])
    interpreter = sys.executable if program.endswith(".py") else "bash"
    try:
        done = subprocess.run(
            [interpreter, str(LIVES / program), fleet, group, name],
            capture_output=True,
            text=True,
            timeout=LIFE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        told = done.stdout
        assert re.search(r"^output: .*model\.pt \d+ bytes$", told, re.MULTILINE), told
        assert re.search(r"^incident: drill\b.*\bpeer\b", told, re.MULTILINE), told
        with pytest.raises(place.client.exceptions.ResourceNotFoundException):
            place.client.describe_training_job(TrainingJobName=name)
        wait_until(
            "the fleet to be gone",
            lambda: fleet not in [each["FleetName"] for each in place.client.list_fleets()["Fleets"]],
        )
    finally:
        _end(place, fleet, group, name)


def _end(place: Workplace, fleet: str, group: str, job: str) -> None:
    """Stop the job and delete the fleet and the group, also after a failed test.

    All later tests share the cluster and expect a single fleet.
    """
    refusals = place.client.exceptions
    with contextlib.suppress(refusals.ResourceNotFoundException, refusals.ConflictException):
        place.client.stop_training_job(TrainingJobName=job)

    def is_deleted() -> bool:
        try:
            place.client.delete_fleet(FleetName=fleet)
        except refusals.ConflictException:  # the job still runs on it
            return False
        except refusals.ResourceNotFoundException:
            return True
        return False

    wait_until("the fleet to be deleted", is_deleted)
    with (
        contextlib.closing(place.cluster.aws("autoscaling")) as auto_scaling,
        contextlib.suppress(auto_scaling.exceptions.ClientError),
    ):
        auto_scaling.delete_auto_scaling_group(AutoScalingGroupName=group, ForceDelete=True)

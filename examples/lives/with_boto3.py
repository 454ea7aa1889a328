"""Shows the complete life of a job with plain boto3, without importing Everstep.

    eval "$(everstep local env)"      or: everstep configure, and AWS_PROFILE=everstep
    python with_boto3.py FLEET GROUP JOB

GROUP is an Auto Scaling group with the tag `everstep:fleet`. docs/operating.md lists all requirements. The script
creates the fleet and the job, and deletes both at the end.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
from pathlib import Path

import boto3

HERE = Path(__file__).parent
fleet, group, job = sys.argv[1:]
everstep = boto3.client("everstep")
SOON = {"Delay": 1, "MaxAttempts": 300}


def source() -> dict[str, str]:
    """Upload the script as a gzipped tar, which the service stores under its SHA-256. Return the job's `Source`."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        tar.add(HERE / "train.py", "train.py")
    body = packed.getvalue()
    return {"SourceId": everstep.put_source(SourceId=hashlib.sha256(body).hexdigest(), Body=body)["SourceId"]}


# Show the changes to the group, register it as a fleet, and wait until its nodes have connected.
wanted = {"FleetName": fleet, "AutoScalingGroupName": group, "MinNodeCount": 2, "SpareCount": 1, "AllowDrills": True}
print("changes:", [change["Setting"] for change in everstep.create_fleet(**wanted, DryRun=True)["Changes"]])
everstep.create_fleet(**wanted)
everstep.get_waiter("fleet_ready").wait(FleetName=fleet, WaiterConfig=SOON)

# Submit the job, and wait until the ranks train.
request = {"TrainingJobName": job, "FleetName": fleet, "Source": source(), "EntryPoint": "train.py", "NodeCount": 2}
print("plan:", everstep.create_training_job(**request, DryRun=True)["Plan"]["WorldSize"], "ranks")
everstep.create_training_job(**request)
everstep.get_waiter("training_job_running").wait(TrainingJobName=job, WaiterConfig=SOON)

# Read the output of the ranks until both have printed something. The installed model has no event streams, so the loop
# polls with the token of the last page.
heard: set[int] = set()
page = everstep.get_log_events(TrainingJobName=job, StartFromHead=True)
while len(heard := heard | {line["Rank"] for line in page["Events"] if "Rank" in line}) < 2:
    page = everstep.get_log_events(TrainingJobName=job, NextToken=page["NextForwardToken"])

# Terminate a node. The job has recovered when it has reached the step before the failure again.
everstep.start_drill(TrainingJobName=job, DrillType="terminate-instance")
everstep.get_waiter("drills_over").wait(TrainingJobName=job, WaiterConfig=SOON)
everstep.get_waiter("training_job_recovered").wait(TrainingJobName=job, WaiterConfig=SOON)

# Pause, resume and stop the job. A pause stores the last step in S3 and frees the nodes.
everstep.pause_training_job(TrainingJobName=job)
everstep.get_waiter("training_job_paused").wait(TrainingJobName=job, WaiterConfig=SOON)
everstep.resume_training_job(TrainingJobName=job)
everstep.get_waiter("training_job_running").wait(TrainingJobName=job, WaiterConfig=SOON)
everstep.stop_training_job(TrainingJobName=job)
everstep.get_waiter("training_job_completed_or_stopped").wait(TrainingJobName=job, WaiterConfig=SOON)

# Print the job's outputs and incidents.
for output in everstep.list_outputs(TrainingJobName=job)["Outputs"]:
    content = everstep.get_output(TrainingJobName=job, Key=output["Key"])["Body"].read()
    print("output:", output["Path"], len(content), "bytes")
for incident in everstep.get_paginator("list_incidents").paginate(TrainingJobName=job).search("Incidents[]"):
    print(
        "incident:", incident["Cause"], "from", incident.get("RestoreSource"), "lost steps", incident.get("LostSteps")
    )

# Delete the job and the fleet. Deleting the fleet terminates its nodes.
everstep.delete_training_job(TrainingJobName=job, DeleteObjects=True, SkipTrash=True)
everstep.delete_fleet(FleetName=fleet)

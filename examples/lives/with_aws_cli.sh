#!/usr/bin/env bash
# The complete life of a job with the AWS CLI. The only part of Everstep on this machine is the service model.
#
#     eval "$(everstep local env)"      or: everstep configure, and AWS_PROFILE=everstep
#     bash with_aws_cli.sh FLEET GROUP JOB
set -euo pipefail
here=$(dirname "$0") fleet=$1 group=$2 job=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Register the group as a fleet, and wait until its nodes have connected.
aws everstep create-fleet --fleet-name "$fleet" --auto-scaling-group-name "$group" --min-node-count 2 \
    --spare-count 1 --allow-drills --query Fleet.FleetStatus
aws everstep wait fleet-ready --fleet-name "$fleet"

# Submit the job. Its source is a gzipped tar, which the service stores under its SHA-256.
tar -C "$here" -czf "$scratch/source.tar.gz" train.py
source_id=$(sha256sum "$scratch/source.tar.gz" | cut -d ' ' -f 1)
aws everstep put-source --source-id "$source_id" --body "$scratch/source.tar.gz" --query SourceId
request=(
    --training-job-name "$job" --fleet-name "$fleet" --source "SourceId=$source_id" --entry-point train.py
    --node-count 2
)
aws everstep create-training-job "${request[@]}" --dry-run --query Plan.WorldSize
aws everstep create-training-job "${request[@]}" --query RunId
aws everstep wait training-job-running --training-job-name "$job"

# Read the output of the ranks until both have printed something. The AWS CLI has no event streams, so the loop polls
# with the token of the last page.
token=
until [ "$(sort -u "$scratch/ranks" 2>/dev/null | wc -l)" -ge 2 ]; do
    aws everstep get-log-events --training-job-name "$job" --start-from-head ${token:+--next-token "$token"} \
        --output json >"$scratch/page"
    python3 -c 'import json, sys; [print(line["Rank"]) for line in json.load(sys.stdin)["Events"] if "Rank" in line]' \
        <"$scratch/page" >>"$scratch/ranks"
    token=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["NextForwardToken"])' <"$scratch/page")
done

# Terminate a node. The job has recovered when it has reached the step before the failure again.
aws everstep start-drill --training-job-name "$job" --drill-type terminate-instance --query DrillId
aws everstep wait drills-over --training-job-name "$job"
aws everstep wait training-job-recovered --training-job-name "$job"

# Pause, resume and stop the job. A pause stores the last step in S3 and frees the nodes.
aws everstep pause-training-job --training-job-name "$job" --query SecondaryStatus
aws everstep wait training-job-paused --training-job-name "$job"
aws everstep resume-training-job --training-job-name "$job" --query SecondaryStatus
aws everstep wait training-job-running --training-job-name "$job"
aws everstep stop-training-job --training-job-name "$job" --query TrainingJobStatus
aws everstep wait training-job-completed-or-stopped --training-job-name "$job"

# Print the job's outputs and incidents.
aws everstep list-outputs --training-job-name "$job" --query 'Outputs[].Key' --output text | tr '\t' '\n' |
    while read -r key; do
        aws everstep get-output --training-job-name "$job" --key "$key" "$scratch/output" >/dev/null
        echo "output: ${key##*/} $(wc -c <"$scratch/output") bytes"
    done
aws everstep list-incidents --training-job-name "$job" \
    --query 'Incidents[].[Cause, RestoreSource, LostSteps]' --output text |
    sed 's/^/incident: /'

# Delete the job and the fleet. Deleting the fleet terminates its nodes.
aws everstep delete-training-job --training-job-name "$job" --delete-objects --skip-trash --query ObjectCount
aws everstep delete-fleet --fleet-name "$fleet" --query FleetStatus

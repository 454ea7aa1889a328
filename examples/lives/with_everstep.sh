#!/usr/bin/env bash
# The complete life of a job with the everstep command.
#
#     eval "$(everstep local env)"      or: everstep configure
#     bash with_everstep.sh FLEET GROUP JOB
set -euo pipefail
here=$(dirname "$0") fleet=$1 group=$2 job=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cp "$here/train.py" "$scratch"

# Register the group as a fleet, and wait until its nodes have connected. --yes skips the confirmation of the changes.
everstep fleets create --name "$fleet" --auto-scaling-group "$group" --min-node-count 2 --spare-count 1 \
    --allow-drills --yes
everstep wait fleet-ready "$fleet" --delay 1

# Submit the job. The command shows the plan first.
everstep jobs submit --name "$job" --fleet "$fleet" --source-dir "$scratch" --entry-point train.py --node-count 2
everstep wait job-running "$job" --delay 1

# Follow the output of each rank until it has printed a line.
for rank in 0 1; do
    everstep jobs logs "$job" -f --rank $rank | head -n 1
done

# Terminate a node. The job has recovered when it has reached the step before the failure again.
everstep drills start terminate-instance --job "$job" --yes
everstep wait drills-over "$job" --delay 1
everstep wait job-recovered "$job" --delay 1

# Pause, resume and stop the job. A pause stores the last step in S3 and frees the nodes.
everstep jobs pause "$job" --wait
everstep jobs resume "$job"
everstep wait job-running "$job" --delay 1
everstep jobs stop "$job"
everstep wait job-completed-or-stopped "$job" --delay 1

# Print the job's outputs and incidents.
everstep jobs output "$job" --to "$scratch/results"
find "$scratch/results" -type f -printf 'output: %P %s bytes\n'
everstep incidents list --job "$job" --query 'Incidents[].[Cause, RestoreSource, LostSteps]' --output text |
    sed 's/^/incident: /'

# Delete the job and the fleet. Deleting the fleet terminates its nodes.
everstep jobs delete "$job" --delete-objects --skip-trash --yes
everstep fleets delete "$fleet" --yes

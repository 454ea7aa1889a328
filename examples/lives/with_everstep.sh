#!/usr/bin/env bash
# The whole life of a job with the everstep command.
#
#     eval "$(everstep local env)"      or: everstep configure
#     bash with_everstep.sh FLEET GROUP JOB
set -euo pipefail
here=$(dirname "$0") fleet=$1 group=$2 job=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cp "$here/train.py" "$scratch"

# Register the group, and wait until its nodes have connected. What changes of it is told; --yes, because nobody is there to be asked.
everstep fleets create --name "$fleet" --auto-scaling-group "$group" --min-node-count 2 --spare-count 1 --allow-drills --yes
everstep wait fleet-ready "$fleet" --delay 1

# Submit: the plan is shown first.
everstep jobs submit --name "$job" --fleet "$fleet" --source-dir "$scratch" --entry-point train.py --node-count 2
everstep wait job-running "$job" --delay 1

# Follow what the ranks print, until each has printed something.
for rank in 0 1; do
    everstep jobs logs "$job" -f --rank $rank | head -n 1
done

# Lose a node. The drill is over when training is where it was before.
everstep drills start terminate-instance --job "$job" --yes
everstep wait drills-over "$job" --delay 1
everstep wait job-recovered "$job" --delay 1

# Pause, which keeps the last step in S3 and frees the nodes; resume; stop.
everstep jobs pause "$job" --wait
everstep jobs resume "$job"
everstep wait job-running "$job" --delay 1
everstep jobs stop "$job"
everstep wait job-completed-or-stopped "$job" --delay 1

# What it left, and what happened to it.
everstep jobs output "$job" --to "$scratch/results"
find "$scratch/results" -type f -printf 'output: %P %s bytes\n'
everstep incidents list --job "$job" --query 'Incidents[].[Cause, RestoreSource, LostSteps]' --output text | sed 's/^/incident: /'

# Forget it all; the fleet's nodes are ended.
everstep jobs delete "$job" --delete-objects --yes
everstep fleets delete "$fleet" --yes

/** Where a job's time went: buckets that add up to the wall time, and who can do something about each. Pure. */
import type { Incident, TrainingJob } from '../contract'

export interface Bucket {
  name: string
  label: string
  seconds: number
  /** Who can make it shorter. */
  owner: string
  what: string
}

const KNOWN: Record<string, Omit<Bucket, 'name' | 'seconds'>> = {
  queue: { label: 'Queue', owner: 'you: priority, or a larger fleet', what: 'waiting for its turn' },
  provision: { label: 'Provision', owner: 'AWS: capacity; you: spares', what: 'waiting for its first nodes' },
  start: { label: 'Start', owner: 'your script: imports, compilation, data', what: 'launches up to the first step of the job' },
  train: { label: 'Train', owner: 'nobody: this is what it is for', what: 'steps that count' },
  shortage: { label: 'Shortage', owner: 'AWS: capacity; you: spares', what: 'training time lost because nodes were missing: (N − n)/N of it on n of N nodes' },
  stall: { label: 'Stall', owner: 'your script: data, evaluation, a hang', what: 'running, but without a step for long' },
  detect: { label: 'Detect', owner: 'Everstep: --detection-seconds', what: 'from a failure until it was noticed' },
  replace: { label: 'Replace', owner: 'Everstep and AWS: spares', what: 'getting nodes ready after a failure' },
  restore: { label: 'Restore', owner: 'Everstep', what: 'launches after a failure or a pause, up to the first new step' },
  rework: { label: 'Rework', owner: 'Everstep: more copies, checkpoints', what: 'steps done again' },
  stopping: { label: 'Stopping', owner: 'your script: its longest step', what: 'an agreed stop' },
  paused: { label: 'Paused', owner: 'you: resume it, priority, or a larger fleet', what: 'without nodes: a person paused it, or a job of higher priority has them' },
  unaccounted: { label: 'Unaccounted', owner: 'whoever runs the control plane', what: 'no control plane looked' },
}

/** `open`: the job's open incident, whose phase fills since the control plane last counted. Known buckets in their order, then those that a newer server adds; what is missing to the wall time is a bucket, too. */
export function buckets(job: Partial<TrainingJob>, now: number, open?: Incident): { buckets: Bucket[]; wallSeconds: number } {
  const seconds = { ...job.AccountingSeconds }
  const until = job.AccountedUntil
  if (open !== undefined && job.TrainingEndTime === undefined && until !== undefined && now > until && open.Phase in KNOWN) {
    seconds[open.Phase] = (seconds[open.Phase] ?? 0) + now - until // the incident’s own clock runs on, too
  }
  const names = [...Object.keys(KNOWN), ...Object.keys(seconds).filter((name) => !(name in KNOWN))]
  const found = names
    .map((name) => ({ name, seconds: Math.max(0, seconds[name] ?? 0), ...(KNOWN[name] ?? { label: name, owner: 'unknown', what: name }) }))
    .filter((bucket) => bucket.seconds > 0)
  const sum = found.reduce((total, bucket) => total + bucket.seconds, 0)
  if (job.CreationTime === undefined) return { buckets: found, wallSeconds: sum }
  const wall = Math.max(0, (job.TrainingEndTime ?? now) - job.CreationTime)
  const isRunning = job.TrainingEndTime === undefined
  const rest = wall - sum
  if (rest > Math.max(0.5, 0.001 * wall)) {
    found.push({
      name: 'rest',
      label: isRunning ? 'Not charged yet' : 'Not charged',
      seconds: rest,
      owner: 'whoever runs the control plane, if it grows',
      what: 'since the control plane last counted',
    })
  }
  return { buckets: found, wallSeconds: Math.max(wall, sum) }
}

/** Where the time of a job went: parts that add up to its wall time. Pure. */
import type { Incident, TrainingJob } from '../contract'
import { TIME } from '../words/jobTabs'

export interface Bucket {
  name: string
  label: string
  seconds: number
  /** The person or system that can shorten this part. Empty for productive time. */
  owner: string
  what: string
}

type Words = Omit<Bucket, 'name' | 'seconds'>
const WORDS: Readonly<Record<string, Words>> = TIME.buckets

/** Return the words for an accounting bucket. A bucket that only a newer server knows is shown by its own name. */
export const wordsOf = (bucket: string): Words => WORDS[bucket] ?? { label: bucket, owner: TIME.unknownOwner, what: '' }

/** Uncounted time up to these limits results from rounding and is not shown. */
const LEAST_REST_SECONDS = 0.5
const LEAST_REST_RATIO = 0.001

/**
 * Return the parts in their fixed order, and their sum.
 *
 * Parts of a newer server that this page does not know come after the known parts. The last part is time that the
 * control plane has not counted.
 *
 * `open`: the job's open incident. The time since the control plane last counted is added to the incident's phase.
 */
export function buckets(
  job: Partial<TrainingJob>,
  now: number,
  open?: Incident,
): { buckets: Bucket[]; wallSeconds: number } {
  const seconds: Record<string, number> = { ...job.AccountingSeconds }
  const until = job.AccountedUntil
  const isRunning = job.TrainingEndTime === undefined
  if (open !== undefined && isRunning && until !== undefined && now > until && open.Phase in WORDS) {
    seconds[open.Phase] = (seconds[open.Phase] ?? 0) + now - until
  }
  const names = [...Object.keys(WORDS), ...Object.keys(seconds).filter((name) => !(name in WORDS))]
  const parts = names
    .map((name) => ({
      name,
      seconds: Math.max(0, seconds[name] ?? 0),
      ...wordsOf(name),
    }))
    .filter((bucket) => bucket.seconds > 0)
  const sum = parts.reduce((total, bucket) => total + bucket.seconds, 0)
  if (job.CreationTime === undefined) return { buckets: parts, wallSeconds: sum }
  const wall = Math.max(0, (job.TrainingEndTime ?? now) - job.CreationTime)
  const rest = wall - sum
  if (rest > Math.max(LEAST_REST_SECONDS, LEAST_REST_RATIO * wall)) {
    const { running, ended, what, owner } = TIME.rest
    parts.push({ name: 'rest', label: job.TrainingEndTime === undefined ? running : ended, seconds: rest, owner, what })
  }
  return { buckets: parts, wallSeconds: Math.max(wall, sum) }
}

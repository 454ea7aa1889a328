/** The pace of a job while this page is open, and the time that remains. Pure. */
import type { TrainingJobSummary } from '../contract'
import { JOB } from '../words/job'
import type { Progress } from './verdict'
import { duration, minute } from './format'
import { isOver } from './standing'

/** The step of a job at one moment. */
export interface Sample {
  /** Unix seconds. */
  at: number
  boundary: number
}

const WINDOW_SECONDS = 30
const MOST_SAMPLES = 120
/** Longest time between samples while the page is visible and polls. After a longer gap, a step's time is unknown. */
const GAP_SECONDS = 10

/**
 * Return the samples with `next` appended, without the oldest beyond the limit.
 *
 * Only `next` is returned if the step went back (a recovery), or if it grew during a gap longer than `GAP_SECONDS`.
 */
export function sampled(samples: readonly Sample[], next: Sample): Sample[] {
  const last = samples.at(-1)
  if (last && next.at <= last.at) return [...samples]
  const isUnseen = last && next.boundary > last.boundary && next.at - last.at > GAP_SECONDS
  if (last && (next.boundary < last.boundary || isUnseen)) return [next]
  return [...samples, next].slice(-MOST_SAMPLES)
}

/** Return the pace from the samples. undefined without samples. `usualRate`: steps per second over the whole job. */
export function progressOf(samples: readonly Sample[], usualRate: number | undefined): Progress | undefined {
  const last = samples.at(-1)
  if (!last) return undefined
  const recent = samples.filter((sample) => sample.at >= last.at - WINDOW_SECONDS)
  const span = last.at - recent[0]!.at
  const steps = last.boundary - recent[0]!.boundary
  return { rate: span >= 5 && steps > 0 ? steps / span : undefined, usualRate }
}

type AheadField = 'TargetStep' | 'EstimatedRemainingSeconds' | 'SecondaryStatus' | 'TrainingJobStatus'

const DAY_SECONDS = 86_400

/** Return the remaining time at the pace so far, and when the job would end without failures. */
export function remainingWords(job: Pick<TrainingJobSummary, AheadField>, now: number): string {
  const words = JOB.remaining
  if (isOver(job)) return '–'
  if (job.TargetStep === undefined) return words.notDeclared
  const seconds = job.EstimatedRemainingSeconds
  if (seconds === undefined) return words.notYet
  if (job.SecondaryStatus !== 'Training') return words.paused(duration(seconds))
  const end = now + seconds
  const moment = seconds < DAY_SECONDS ? `${minute(end)} UTC` : new Date(end * 1000).toISOString().slice(0, 10)
  return words.until(duration(seconds), moment)
}

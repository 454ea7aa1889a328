/** How a job moves while this browser looks. Pure but for its caller's list of samples. */
import type { TrainingJobSummary } from '../contract'
import { clock, duration } from './format'
import { isOver, type Progress } from './verdict'

export interface Sample {
  at: number
  boundary: number
}
const WINDOW_SECONDS = 30
const MOST = 120
/** A page that is looked at asks every 2 s: steps that came in a longer hole came nobody knows when. */
const HOLE_SECONDS = 10

/** Return the samples with one more, old ones dropped; a boundary that went back (a recovery) begins anew, and so does one that rose while nobody looked. */
export function sampled(samples: readonly Sample[], next: Sample): Sample[] {
  const last = samples.at(-1)
  if (last && next.at <= last.at) return [...samples]
  if (last && (next.boundary < last.boundary || (next.boundary > last.boundary && next.at - last.at > HOLE_SECONDS))) return [next]
  return [...samples, next].slice(-MOST)
}

export function progressOf(samples: readonly Sample[], usualRate: number | undefined): Progress | undefined {
  const first = samples[0]
  const last = samples.at(-1)
  if (!first || !last) return undefined
  const moves = samples.filter((sample, index) => index > 0 && sample.boundary > samples[index - 1]!.boundary)
  const recent = samples.filter((sample) => sample.at >= last.at - WINDOW_SECONDS)
  const span = last.at - recent[0]!.at
  const steps = last.boundary - recent[0]!.boundary
  return {
    boundary: last.boundary,
    movedAt: moves.at(-1)?.at,
    rate: span >= 5 && steps > 0 ? steps / span : undefined,
    usualRate,
    watchedSince: first.at,
  }
}

type Ahead = Pick<TrainingJobSummary, 'Boundary' | 'TargetStep' | 'EstimatedRemainingSeconds' | 'SecondaryStatus' | 'TrainingJobStatus'>

/** How much of a job is done, 0 to 1; undefined where its script has not said how far it will go. */
export const done = ({ Boundary, TargetStep }: Pick<Ahead, 'Boundary' | 'TargetStep'>): number | undefined => (TargetStep ? Math.min(1, Math.max(0, Boundary) / TargetStep) : undefined)

const DAY = 86_400

/** How long the rest takes at the pace so far, and when that would be; nothing of it is a promise. */
export function left(job: Ahead, now: number): string {
  if (isOver(job)) return '–'
  if (job.TargetStep === undefined) return 'not known: the script has not said where it ends'
  const seconds = job.EstimatedRemainingSeconds
  if (seconds === undefined) return 'not known yet'
  if (job.SecondaryStatus !== 'Training') return `${duration(seconds)} of training`
  const at = now + seconds
  return `${duration(seconds)}, until ${seconds < DAY ? `${clock(at).slice(0, 5)} UTC` : new Date(at * 1000).toISOString().slice(0, 10)} if nothing fails`
}

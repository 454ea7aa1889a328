/** How a job moves while this browser looks. Pure but for its caller's list of samples. */
import type { Progress } from './verdict'

export interface Sample {
  at: number
  boundary: number
}
const WINDOW_SECONDS = 30
const MOST = 120

/** Return the samples with one more, old ones dropped; a boundary that went back (a recovery) begins anew. */
export function sampled(samples: readonly Sample[], next: Sample): Sample[] {
  const last = samples.at(-1)
  if (last && next.at <= last.at) return [...samples]
  if (last && next.boundary < last.boundary) return [next]
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

/** Logged values as columns over steps or over time, and where failures lie on either axis. Pure. */
import type { Incident, TrainingJob } from '../contract'

export type Axis = 'step' | 'wall'

/** What was logged for one step, or the mean of several steps up to this one. */
export interface Point {
  step: number
  /** Unix time. */
  at: number
  values: Record<string, number | 'NaN' | 'Infinity' | '-Infinity' | null>
}

export interface Series {
  names: string[]
  /** Steps or Unix times, rising. */
  x: number[]
  /** null where nothing was logged, where what was is not finite, and where training stood still: drawn as a gap. */
  values: Record<string, (number | null)[]>
}

export interface Band {
  incidentId: string
  cause: string
  from: number
  to: number
}

/** Where failures lie: over steps, those that were done again; over time, from the failure until training was where it had been. */
export function bands(incidents: readonly Incident[], axis: Axis, now: number): Band[] {
  const made = (each: Incident, from: number | undefined, to: number | undefined): Band[] => (from === undefined || to === undefined ? [] : [{ incidentId: each.IncidentId, cause: each.Cause, from, to }])
  return incidents.flatMap((each) => (axis === 'step' ? made(each, each.FromStep ?? each.ReachedStep, each.ReachedStep) : made(each, each.FailedAt, each.ClosedAt ?? now)))
}

const finite = (value: Point['values'][string] | undefined): number | null => (typeof value === 'number' && Number.isFinite(value) ? value : null)

/** A moment from which on nothing can have been logged. */
export type Gap = Pick<Band, 'from'>

/** When a job stopped training, whatever for: paused, preempted, queued, or being recovered. */
export const standstills = (transitions: TrainingJob['SecondaryStatusTransitions'] = []): Gap[] =>
  transitions.filter((each, index) => each.State !== 'running' && transitions[index - 1]?.State === 'running').map((each) => ({ from: each.StartTime }))

/** Over time, everything is shown when it was logged, with a gap for each failure and for whatever else it stood still for. */
export function series(points: readonly Point[], axis: Axis, failures: readonly Gap[] = []): Series {
  const names = [...new Set(points.flatMap((point) => Object.keys(point.values)))].sort()
  const rows: Row[] = axis === 'step' ? points.map((point) => ({ x: point.step, values: point.values })) : overTime(points, failures)
  return { names, x: rows.map((row) => row.x), values: Object.fromEntries(names.map((name) => [name, rows.map((row) => finite(row.values?.[name]))])) }
}

interface Row {
  x: number
  values?: Point['values']
}

function overTime(points: readonly Point[], failures: readonly Gap[]): Row[] {
  const rows: Row[] = points.map((point) => ({ x: point.at, values: point.values }))
  return [...rows, ...failures.map((band) => ({ x: band.from }))].sort((a, b) => a.x - b.x)
}

/** Every point, one a line. */
export function csv(points: readonly Point[]): string {
  const names = [...new Set(points.flatMap((point) => Object.keys(point.values)))].sort()
  const quoted = (text: string) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text)
  return [['step', 'time', ...names.map(quoted)], ...points.map((point) => [point.step, new Date(point.at * 1000).toISOString(), ...names.map((name) => point.values[name] ?? '')])].map((row) => row.join(',') + '\n').join('')
}

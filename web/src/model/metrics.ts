/** Logged values as columns over steps or over time, and where failures lie on either axis. Pure. */
import type { Incident, TrainingJob } from '../contract'

export type Axis = 'step' | 'wall'

export type Values = Record<string, number | 'NaN' | 'Infinity' | '-Infinity' | null>

/** What was logged for one step, or what several steps up to this one come to. */
export interface Point {
  /** The last one. */
  step: number
  firstStep: number
  /** Unix time. */
  at: number
  /** Means. */
  values: Values
  least: Values
  most: Values
  /** The node of each least, where it was measured on several. */
  leastOn?: Names
  mostOn?: Names
}

export type Names = Record<string, string | undefined>

/** A part of an axis. */
export interface Window {
  axis: Axis
  from: number
  to: number
}

/** One metric over its own points alone: a line joins neighbours, and metrics are not logged at the same steps. */
export interface Series {
  /** Steps or Unix times, rising. */
  x: number[]
  /** null where what was logged is not finite, and where training stood still: drawn as a gap. */
  values: (number | null)[]
  least: (number | null)[]
  most: (number | null)[]
  /** For each place in `x`: the node of the least, where it was measured on several. */
  leastOn: (string | undefined)[]
  mostOn: (string | undefined)[]
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

/** Whether there is anything between the first and the last place: around a single one, a plot makes room as it likes. */
export const isSpan = (x: readonly number[]): boolean => x.length > 0 && x[0] !== x.at(-1)

/** What of its places a chart shows, by its scale; undefined: all of them. */
export function windowOf(axis: Axis, scale: { min?: number | null; max?: number | null }, x: readonly number[]): Window | undefined {
  const { min, max } = scale
  if (min === undefined || max === undefined || min === null || max === null || !isSpan(x)) return undefined
  return min !== x[0] || max !== x.at(-1) ? { axis, from: min, to: max } : undefined
}

/** Whether more can be seen of a window than is drawn: a point in it joins several steps. */
export function isCoarse(points: readonly Point[], window: Window): boolean {
  return points.some((point) => point.firstStep < point.step && touches(point, window))
}

/** Finer points, in order of steps, in place of those that say something of the same steps. */
export function joined(points: readonly Point[], detail: readonly Point[]): Point[] {
  if (!detail.length) return [...points]
  const [from, to] = [detail[0]!.firstStep, detail.at(-1)!.step]
  const outside = points.filter((point) => point.step < from || point.firstStep > to)
  return [...outside, ...detail].sort((a, b) => a.step - b.step)
}

function touches(point: Point, window: Window): boolean {
  return window.axis === 'wall' ? window.from <= point.at && point.at <= window.to : point.step >= window.from && point.firstStep <= window.to
}

const finite = (value: Values[string] | undefined): number | null => (typeof value === 'number' && Number.isFinite(value) ? value : null)

/** A moment from which on nothing can have been logged. */
export type Gap = Pick<Band, 'from'>

/** When a job stopped training, whatever for: paused, preempted, queued, or being recovered. */
export const standstills = (transitions: TrainingJob['SecondaryStatusTransitions'] = []): Gap[] =>
  transitions.filter((each, index) => each.State !== 'running' && transitions[index - 1]?.State === 'running').map((each) => ({ from: each.StartTime }))

/** What was logged by one name. Over time, it is shown when it was logged, with a gap for each failure and for whatever else training stood still for. */
export function series(points: readonly Point[], name: string, axis: Axis, failures: readonly Gap[] = []): Series {
  const mine = points.filter((point) => Object.hasOwn(point.values, name))
  const rows: Row[] = axis === 'step' ? mine.map((point) => ({ x: point.step, point })) : overTime(mine, failures)
  const column = (of: 'values' | 'least' | 'most') => rows.map((row) => finite(row.point?.[of][name]))
  const nodes = (of: 'leastOn' | 'mostOn') => rows.map((row) => row.point?.[of]?.[name] || undefined)
  return { x: rows.map((row) => row.x), values: column('values'), least: column('least'), most: column('most'), leastOn: nodes('leastOn'), mostOn: nodes('mostOn') }
}

interface Row {
  x: number
  point?: Point
}

function overTime(points: readonly Point[], failures: readonly Gap[]): Row[] {
  const rows: Row[] = points.map((point) => ({ x: point.at, point }))
  return [...rows, ...failures.map((band) => ({ x: band.from }))].sort((a, b) => a.x - b.x)
}

/** Of all metrics, in the order of the alphabet. */
export const namesIn = (points: readonly Point[]): string[] => [...new Set(points.flatMap((point) => Object.keys(point.values)))].sort()

/** Every point, one a line. */
export function csv(points: readonly Point[]): string {
  const names = namesIn(points)
  const quoted = (text: string) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text)
  return [['step', 'time', ...names.map(quoted)], ...points.map((point) => [point.step, new Date(point.at * 1000).toISOString(), ...names.map((name) => point.values[name] ?? '')])].map((row) => row.join(',') + '\n').join('')
}

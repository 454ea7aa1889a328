/** Converts metrics to the lines of a chart over steps, time or tokens, with the failures on its axis. Pure. */
import type { Incident, MetricDataResult, TrainingJob } from '../contract'
import { COLUMNS, type Logged } from './changes'
import { quoted } from './reports'

/** `elapsed`: seconds since the first value. `tokens`: values of the metric that counts tokens (`tokensMetric`). */
export type Axis = 'step' | 'wall' | 'elapsed' | 'tokens'

/** A part of an axis. A request for metrics can be limited to it. */
export interface Window {
  axis: 'step' | 'wall'
  from: number
  to: number
}

type Values = readonly (number | null)[]

/** One metric of one run. All columns have the same length. */
export interface Series {
  /** Positions on the axis, rising. */
  x: number[]
  /** Means. null: the value is not finite, or training stood still. A chart then draws a gap. */
  y: Values
  low: Values
  high: Values
  /** Nodes with the minimum and the maximum, for metrics that several nodes measure. */
  lowOn: readonly (string | undefined)[]
  highOn: readonly (string | undefined)[]
}

/** A failure on an axis. */
export interface Fault {
  /** Place in the list of the job's failures, from 1. */
  number: number
  incidentId: string
  cause: string
  /** Over steps: the repeated steps. Over time: from the failure until training has reached the same step again. */
  from: number
  to: number
}

/** Return the failures on an axis. `now`: end of open incidents, in Unix seconds. `startedAt`: zero of elapsed time. */
export function faultsOn(incidents: readonly Incident[], axis: Axis, now: number, startedAt = 0): Fault[] {
  if (axis === 'tokens') return []
  return incidents.flatMap((each, index) => {
    const [from, to] =
      axis === 'step'
        ? [each.FromStep ?? each.ReachedStep, each.ReachedStep]
        : [each.FailedAt, each.ClosedAt ?? now].map((at) => at - (axis === 'elapsed' ? startedAt : 0))
    if (from === undefined || to === undefined) return []
    return [{ number: index + 1, incidentId: each.IncidentId, cause: each.Cause, from, to }]
  })
}

/** Return the times at which training stopped for any reason: a pause, a preemption, a recovery. Unix seconds. */
export const standstills = (transitions: TrainingJob['SecondaryStatusTransitions'] = []): number[] =>
  transitions
    .filter((each, index) => each.State !== 'running' && transitions[index - 1]?.State === 'running')
    .map((each) => each.StartTime)

/** Return the time of the first value of any metric, in Unix seconds. */
export const startOf = (metrics: Logged): number =>
  [...metrics.values()].reduce((least, each) => Math.min(least, each.Times[0] ?? least), Infinity)

/** Return the name of the metric that counts tokens, if the script logs one. */
export const tokensMetric = (names: readonly string[]): string | undefined =>
  names.find((name) => /(^|[/_])(tokens|tokens_seen|tokens_total|total_tokens|num_tokens|consumed_tokens)$/i.test(name))

/** Return a function from a step to the number of tokens, by linear interpolation. null outside the logged steps. */
export function tokensAt(counted: MetricDataResult | undefined): (step: number) => number | null {
  if (!counted) return () => null
  const { LastSteps: steps, LastValues: values } = counted
  return (step) => {
    const after = lowerBound(steps, step)
    const high = finite(values[after])
    if (high === null || steps[after] === step) return high
    const low = finite(values[after - 1])
    if (low === null) return null
    return low + ((high - low) * (step - steps[after - 1]!)) / (steps[after]! - steps[after - 1]!)
  }
}

/** Return the index of the first value in a rising list that is at least `wanted`, or the list's length. */
export function lowerBound(list: readonly number[], wanted: number): number {
  let [from, to] = [0, list.length]
  while (from < to) {
    const middle = (from + to) >> 1
    if (list[middle]! < wanted) from = middle + 1
    else to = middle
  }
  return from
}

export const finite = (value: number | string | null | undefined): number | null =>
  typeof value === 'number' && Number.isFinite(value) ? value : null

interface Scale {
  axis: Axis
  /** Unix seconds at which a gap begins. Only over time. */
  gaps?: readonly number[]
  /** Unix seconds at which the elapsed time is 0. */
  startedAt?: number
  /** Converts a step to the number of tokens; null outside the logged steps. */
  tokens?: (step: number) => number | null
}

/** Return one metric as a line over an axis. */
export function series(metric: MetricDataResult, { axis, gaps = [], startedAt = 0, tokens }: Scale): Series {
  const isTime = axis === 'wall' || axis === 'elapsed'
  const shift = axis === 'elapsed' ? startedAt : 0
  const position = (index: number): number | null => {
    if (isTime) return metric.Times[index]! - shift
    return axis === 'tokens' ? (tokens?.(metric.LastSteps[index]!) ?? null) : metric.LastSteps[index]!
  }
  const rows: { x: number; index?: number }[] = []
  let next = 0
  const breaks = isTime ? [...gaps, ...silences(metric.Times)].sort((a, b) => a - b) : []
  metric.Steps.forEach((_, index) => {
    const x = position(index)
    if (x === null || x < (rows.at(-1)?.x ?? x)) return // skip a point at which the counter of tokens has fallen
    while (next < breaks.length && breaks[next]! - shift < x) {
      const at = breaks[next++]! - shift
      const before = rows.at(-1)
      if (before) rows.push({ x: at > before.x ? at : (before.x + x) / 2 })
    }
    rows.push({ x, index })
  })
  const column = <T>(of: (index: number) => T): (T | null)[] =>
    rows.map((row) => (row.index === undefined ? null : of(row.index)))
  const node = (ids: readonly string[]) =>
    rows.map((row) => (row.index === undefined ? undefined : ids[row.index] || undefined))
  return {
    x: rows.map((row) => row.x),
    y: column((index) => finite(metric.Means[index])),
    low: column((index) => finite(metric.Minimums[index])),
    high: column((index) => finite(metric.Maximums[index])),
    lowOn: node(metric.MinimumNodeIds),
    highOn: node(metric.MaximumNodeIds),
  }
}

/** A pause between two points is a gap if it is longer than this many times the median pause. */
const SILENCE_FACTOR = 10
const MIN_SILENCE_SECONDS = 60

/** Return the starts of pauses that are much longer than usual, for example while no control plane ran. */
function silences(times: readonly number[]): number[] {
  const pauses = times.slice(1).map((at, index) => at - times[index]!)
  const usual = pauses.toSorted((a, b) => a - b)[pauses.length >> 1] ?? 0
  const most = Math.max(MIN_SILENCE_SECONDS, SILENCE_FACTOR * usual)
  return pauses.flatMap((pause, index) => (pause > most ? [times[index]! + usual] : []))
}

/** Return whether finer points exist for a window: the response has a point in it that joins several steps. */
export function isCoarse(metrics: Logged, window: Window): boolean {
  return [...metrics.values()].some((metric) =>
    metric.LastSteps.some((last, index) => metric.Steps[index]! < last && touches(metric, index, window)),
  )
}

function touches(metric: MetricDataResult, index: number, { axis, from, to }: Window): boolean {
  if (axis === 'wall') return from <= metric.Times[index]! && metric.Times[index]! <= to
  return metric.LastSteps[index]! >= from && metric.Steps[index]! <= to
}

/** Return the metrics with the finer points of a window in place of the points that cover the same steps. */
export function detailed(metrics: Logged, detail: Logged): Logged {
  return new Map([...metrics].map(([name, metric]) => [name, refined(metric, detail.get(name))]))
}

function refined(metric: MetricDataResult, finer: MetricDataResult | undefined): MetricDataResult {
  if (!finer?.Steps.length) return metric
  const before = lowerBound(metric.LastSteps, finer.Steps[0]!)
  const after = lowerBound(metric.Steps, finer.LastSteps.at(-1)! + 1)
  const joined = { ...metric }
  for (const column of COLUMNS) {
    const outside = [metric[column].slice(0, before), metric[column].slice(after)]
    Object.assign(joined, { [column]: [...outside[0]!, ...finer[column], ...outside[1]!] })
  }
  return joined
}

/** Return all means, one row per step. */
export function csv(metrics: Logged): string {
  const names = [...metrics.keys()].toSorted()
  const rows = new Map<number, { at: number; values: Map<string, unknown> }>()
  for (const name of names) {
    const metric = metrics.get(name)!
    metric.LastSteps.forEach((step, index) => {
      const row = rows.get(step) ?? { at: metric.Times[index]!, values: new Map() }
      row.values.set(name, metric.Means[index])
      rows.set(step, row)
    })
  }
  const lines = [...rows]
    .toSorted(([a], [b]) => a - b)
    .map(([step, { at, values }]) =>
      [step, new Date(at * 1000).toISOString(), ...names.map((name) => values.get(name) ?? '')].join(','),
    )
  return [['step', 'time', ...names.map(quoted)].join(','), ...lines].map((line) => `${line}\n`).join('')
}

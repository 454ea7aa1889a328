/** What Everstep measures of a job itself, beside what its script logs. Pure. */
import { bytes } from './format'
import { series, type Axis, type Gap, type Point, type Series } from './metrics'

const PREFIX = 'everstep/'

/** In the order in which they are shown; others of our names come after these. */
const TITLES: Record<string, string> = {
  'everstep/step_seconds': 'Step time, seconds',
  'everstep/snapshot_blocked_seconds': 'Held up by the snapshot, seconds a step',
  'everstep/replicate_seconds': 'From a step to its last verified copy, seconds',
  'everstep/replica_bytes_per_second': 'Replicas a node sends, bytes/s',
  'everstep/network_bytes_per_second': 'Network of a node, bytes/s',
  'everstep/gpu_percent': 'GPUs busy, % of a node',
  'everstep/gpu_least_percent': 'Idlest GPU of a node, % busy',
}
const ORDER = Object.keys(TITLES)

export const titleOf = (name: string): string => TITLES[name] ?? name

const kept = <T,>(values: Record<string, T>, keep: (name: string) => boolean): Record<string, T> => Object.fromEntries(Object.entries(values).filter(([name]) => keep(name)))

const only = (points: readonly Point[], keep: (name: string) => boolean): Point[] =>
  points.map((point) => ({ ...point, values: kept(point.values, keep), least: kept(point.least, keep), most: kept(point.most, keep), leastOn: kept(point.leastOn ?? {}, keep), mostOn: kept(point.mostOn ?? {}, keep) })).filter((point) => Object.keys(point.values).length > 0)

/** What the script logged. */
export const ofScript = (points: readonly Point[]): Point[] => only(points, (name) => !name.startsWith(PREFIX))

/** One chart for each of our own values, over its own points alone: they come more seldom than steps, and a line needs neighbours. */
export function ownSeries(points: readonly Point[], axis: Axis, failures: readonly Gap[]): { name: string; series: Series }[] {
  const names = [...new Set(points.flatMap((point) => Object.keys(point.values).filter((name) => name.startsWith(PREFIX))))]
  const rank = (name: string) => (ORDER.indexOf(name) + ORDER.length + 1) % (ORDER.length + 1)
  return names
    .sort((a, b) => rank(a) - rank(b) || a.localeCompare(b))
    .map((name) => ({ name, series: series(only(points, (each) => each === name), axis, failures) }))
}

/** The nodes between which all others are, by the newest point that names any; undefined where one node alone was heard, or all say the same. */
export function extremes(name: string, of: Series): { median: string; least: { node: string; value: string }; most: { node: string; value: string } } | undefined {
  const at = (of.leastOn[name] ?? []).findLastIndex((node) => node !== undefined)
  const [least, most, median] = [of.least[name]?.[at], of.most[name]?.[at], of.values[name]?.[at]]
  const [leastOn, mostOn] = [of.leastOn[name]?.[at], of.mostOn[name]?.[at]]
  if (least === undefined || least === null || most === undefined || most === null || median === undefined || median === null || leastOn === undefined || mostOn === undefined || least === most) return undefined
  return { median: figure(name, median), least: { node: leastOn, value: figure(name, least) }, most: { node: mostOn, value: figure(name, most) } }
}

function figure(name: string, value: number): string {
  if (name.endsWith('_bytes_per_second')) return `${bytes(Math.round(value))}/s`
  const rounded = String(Number(value.toPrecision(3)))
  return name.endsWith('_percent') ? `${rounded} %` : name.endsWith('_seconds') ? `${rounded} s` : rounded
}

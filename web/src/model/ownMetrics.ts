/** What Everstep measures of a job itself, beside what its script logs. Pure. */
import { series, type Axis, type Gap, type Point, type Series, type Values } from './metrics'

const PREFIX = 'everstep/'

/** In the order in which they are shown; others of our names come after these. */
const TITLES: Record<string, string> = {
  'everstep/step_seconds': 'Step time, seconds',
  'everstep/snapshot_blocked_seconds': 'Held up by the snapshot, seconds a step',
  'everstep/replicate_seconds': 'From a step to its last verified copy, seconds',
  'everstep/replica_bytes_per_second': 'Replicas sent, bytes/s',
  'everstep/network_bytes_per_second': 'Network of the node, bytes/s',
  'everstep/gpu_percent': 'GPUs busy, %',
}
const ORDER = Object.keys(TITLES)

export const titleOf = (name: string): string => TITLES[name] ?? name

const kept = (values: Values, keep: (name: string) => boolean): Values => Object.fromEntries(Object.entries(values).filter(([name]) => keep(name)))

const only = (points: readonly Point[], keep: (name: string) => boolean): Point[] =>
  points.map((point) => ({ ...point, values: kept(point.values, keep), least: kept(point.least, keep), most: kept(point.most, keep) })).filter((point) => Object.keys(point.values).length > 0)

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

/** What Everstep measures of a job itself, beside what its script logs. Pure. */
import { bytes } from './format'
import { namesIn, type Point, type Series } from './metrics'

const PREFIX = 'everstep/'

/** In the order in which they are shown; others of our names come after these. */
const TITLES: Record<string, string> = {
  'everstep/step_seconds': 'Step time, seconds',
  'everstep/snapshot_blocked_seconds': 'Held up by the snapshot, seconds a step',
  'everstep/replicate_seconds': 'From a step to its last verified copy, seconds',
  'everstep/replica_bytes_per_second': 'Replicas a node sends, bytes/s',
  'everstep/network_bytes_per_second': 'Network of a node, bytes/s',
  'everstep/memory_used_bytes': 'Memory of a node in use',
  'everstep/rank_memory_bytes': 'Memory of the largest rank of a node',
  'everstep/gpu_percent': 'GPUs busy, % of a node',
  'everstep/gpu_least_percent': 'Idlest GPU of a node, % busy',
}
const ORDER = Object.keys(TITLES)

export const titleOf = (name: string): string => TITLES[name] ?? name

const isOurs = (name: string): boolean => name.startsWith(PREFIX)

/** What the script logged. */
export const scriptNames = (points: readonly Point[]): string[] => namesIn(points).filter((name) => !isOurs(name))

/** What Everstep measured, in the order in which it is shown. */
export function ownNames(points: readonly Point[]): string[] {
  const rank = (name: string) => (ORDER.indexOf(name) + ORDER.length + 1) % (ORDER.length + 1)
  return namesIn(points).filter(isOurs).sort((a, b) => rank(a) - rank(b) || a.localeCompare(b))
}

/** The nodes between which all others are, by the newest point that names any; undefined where one node alone was heard, or all say the same. */
export function extremes(name: string, of: Series): { median: string; least: { node: string; value: string }; most: { node: string; value: string } } | undefined {
  const at = of.leastOn.findLastIndex((node) => node !== undefined)
  const [least, most, median] = [of.least[at], of.most[at], of.values[at]]
  const [leastOn, mostOn] = [of.leastOn[at], of.mostOn[at]]
  if (least === undefined || least === null || most === undefined || most === null || median === undefined || median === null || leastOn === undefined || mostOn === undefined || least === most) return undefined
  return { median: figure(name, median), least: { node: leastOn, value: figure(name, least) }, most: { node: mostOn, value: figure(name, most) } }
}

function figure(name: string, value: number): string {
  if (name.endsWith('_bytes_per_second')) return `${bytes(Math.round(value))}/s`
  if (name.endsWith('_bytes')) return bytes(Math.round(value))
  const rounded = String(Number(value.toPrecision(3)))
  return name.endsWith('_percent') ? `${rounded} %` : name.endsWith('_seconds') ? `${rounded} s` : rounded
}

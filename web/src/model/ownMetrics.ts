/** Names, units and groups of metrics: those that the script logs, and those that Everstep measures. Pure. */
import type { Unit } from './chart'
import type { Series } from './metrics'

const PREFIX = 'everstep/'

interface Own {
  title: string
  group: string
}

const STEPS = 'Steps and protection'
const NODES = 'Nodes'
/** The metrics that Everstep measures, in the order of the page. */
const OWN: Record<string, Own> = {
  'everstep/step_seconds': { title: 'Time per step', group: STEPS },
  'everstep/snapshot_blocked_seconds': { title: 'Snapshot: blocked time per step', group: STEPS },
  'everstep/replicate_seconds': { title: 'Time until all copies are verified', group: STEPS },
  'everstep/replica_bytes_per_second': { title: 'Replica traffic sent, per node', group: STEPS },
  'everstep/gpu_percent': { title: 'GPU utilization, per node', group: NODES },
  'everstep/gpu_least_percent': { title: 'Least utilized GPU of a node', group: NODES },
  'everstep/network_bytes_per_second': { title: 'Network traffic, per node', group: NODES },
  'everstep/memory_used_bytes': { title: 'Memory in use, per node', group: NODES },
  'everstep/rank_memory_bytes': { title: 'Memory of the largest rank, per node', group: NODES },
}
const ORDER = Object.keys(OWN)

export const titleOf = (name: string): string => OWN[name]?.title ?? name

export const isOwn = (name: string): boolean => name.startsWith(PREFIX)

/** Return the unit of a metric, which the end of its name determines. */
export function unitOf(name: string): Unit {
  if (/_bytes_per_(second|sec)$/.test(name)) return 'bytes/s'
  if (name.endsWith('_bytes')) return 'bytes'
  if (/_(seconds|secs)$/.test(name)) return 'seconds'
  return name.endsWith('_percent') ? 'percent' : 'number'
}

export interface Group {
  title: string
  names: string[]
}

/** Title of the group of metrics whose names have no prefix. */
export const UNPREFIXED = 'Logged by the script'

/** Group the script's metrics by their names' prefix (no prefix first, then train/), and Everstep's own by subject. */
export function groups(names: readonly string[]): Group[] {
  const found = new Map<string, string[]>()
  const prefix = (name: string) => (name.includes('/') ? name.slice(0, name.indexOf('/')) : UNPREFIXED)
  for (const name of names.filter((each) => !isOwn(each)).toSorted()) {
    found.set(prefix(name), [...(found.get(prefix(name)) ?? []), name])
  }
  const rank = (name: string) => (ORDER.indexOf(name) + ORDER.length + 1) % (ORDER.length + 1)
  const own = names.filter(isOwn).toSorted((a, b) => rank(a) - rank(b) || a.localeCompare(b))
  for (const title of [STEPS, NODES]) {
    const mine = own.filter((name) => (OWN[name]?.group ?? NODES) === title)
    if (mine.length) found.set(title, mine)
  }
  const first = (title: string) => (title === UNPREFIXED ? 0 : title === 'train' ? 1 : 2)
  return [...found].map(([title, each]) => ({ title, names: each })).sort((a, b) => first(a.title) - first(b.title))
}

/** Return the nodes with the least and the greatest value at the newest point that names nodes. */
export function extremes(of: Series): { least: string; most: string } | undefined {
  const at = of.lowOn.findLastIndex((node) => node !== undefined)
  const [low, high, least, most] = [of.low[at], of.high[at], of.lowOn[at], of.highOn[at]]
  if (low == null || high == null || low === high || least === undefined || most === undefined) return undefined
  return { least, most }
}

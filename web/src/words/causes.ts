/** What Everstep does in each phase of an incident. The words for causes and sources of state are in `contract.ts`. */
export const PHASES = {
  detect: 'detecting the failure',
  replace: 'replacing nodes',
  restore: 'restoring state',
  rework: 'recomputing steps',
} as const

/** What happened in a phase whose usual name would be wrong. `short`: word inside a bar. `color`: color of the bar. */
export const HAPPENINGS = {
  absent: { words: 'control plane was down', short: 'down', color: 'unaccounted' },
  restart: { words: 'restarting ranks', short: 'restarting', color: 'start' },
  stop: { words: 'noticing the agreed stop', short: 'noticing', color: 'detect' },
  grow: { words: 'adding nodes', short: 'adding', color: 'replace' },
  shrink: { words: 'waiting for nodes', short: 'waiting', color: 'queue' },
} as const

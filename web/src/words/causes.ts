/** What Everstep does in each phase of an incident. The words for causes and sources of state are in `contract.ts`. */
export const PHASES = {
  unaccounted: 'without a control plane',
  detect: 'detecting the failure',
  replace: 'replacing nodes',
  restore: 'restoring state',
  rework: 'recomputing steps',
} as const

/** What happened in a phase whose usual name would be wrong. `color`: color of the bar. */
export const HAPPENINGS = {
  restart: { words: 'restarting ranks', color: 'start' },
  stop: { words: 'noticing the agreed stop', color: 'detect' },
  grow: { words: 'adding nodes', color: 'replace' },
  shrink: { words: 'waiting for nodes', color: 'queue' },
} as const

/** What Everstep does, by the phase of an incident. The API's contract has the words for causes and sources. */
export const PHASES = {
  detect: 'detecting the failure',
  replace: 'replacing nodes',
  restore: 'restoring state',
  rework: 'recomputing steps',
} as const

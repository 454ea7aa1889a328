/** Words for the causes of incidents and the sources of a restore. Many pages use them. */
import type { Incident } from '../contract'

/** What happened, by cause. */
export const CAUSES: Readonly<Record<Incident['Cause'], string>> = {
  load_failed: 'A shard could not be loaded',
  rank_exit: 'A training process failed',
  hang: 'The ranks hung',
  notice: 'AWS announced the end of a node',
  requested: 'A person requested a node',
  pause_failed: 'The job could not be paused',
  drill: 'A drill caused a fault',
  agent_lost: 'An agent lost its state of the job',
  node_unreachable: 'A node became unreachable',
  node_fault: 'A node reported a fault',
  instance_terminated: 'An instance was terminated',
  shrunk: 'Lost nodes were not replaced',
  grown: 'The job stopped to continue on more nodes',
  returned: 'The job stopped to return nodes to its fleet',
  group_lost: 'All nodes that held a shard were lost',
}

/** Where restored state came from: the API's word, in words. */
export const SOURCES: Readonly<Record<string, string>> = {
  local: 'memory of the own nodes',
  peer: 'memory of other nodes',
  parity: 'parity in memory',
  s3: 'S3',
}

/** What Everstep does, by phase. */
export const PHASES = {
  detect: 'detecting the failure',
  replace: 'replacing nodes',
  restore: 'restoring state',
  rework: 'recomputing steps',
} as const

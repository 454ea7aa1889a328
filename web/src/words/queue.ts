/** Every text of the page Queue. */
import { count, plural } from '../model/format'

export const QUEUE = {
  title: 'Queue',
  verdict: {
    waiting: (jobs: number, nodes: number) =>
      `${plural(jobs, 'job')} ${jobs === 1 ? 'waits' : 'wait'} for ${plural(nodes, 'node')}.`,
    first: (job: string, fleet: string) => `Next on ${fleet}: ${job}.`,
    none: 'No job waits for nodes.',
  },
  empty: {
    title: 'The queue is empty',
    text: 'A job waits here until its fleet has enough free nodes: higher priority first, then the oldest.',
  },
  limit: (shown: number, all: number) => `The page shows the first ${shown} of ${count(all)} jobs.`,
  capacity: (nodes: number, limit: number) => `${count(nodes)} of at most ${count(limit)} nodes`,
  columns: {
    place: 'Place',
    job: 'Job',
    status: 'Status',
    nodes: 'Nodes',
    priority: 'Priority',
    reason: 'Waits for',
    ahead: 'Jobs ahead',
    freed: 'What starts it',
    created: 'Created',
  },
  noneAhead: 'none',
  ways: {
    tooLarge: (group: string, limit: number, wanted: number) =>
      `A larger group: ${group} has at most ${plural(limit, 'node')}, and the job needs ${count(wanted)}.`,
    frozen: 'The end of the freeze: Everstep starts no job on a frozen fleet.',
    ahead: (jobs: readonly string[]) =>
      jobs.length === 1 ? `The start of ${jobs[0]}.` : `The start of the ${count(jobs.length)} jobs ahead.`,
    holders: (holders: string) => `The end of ${holders}, or of other jobs with as many nodes.`,
    holder: (job: string, nodes: number) => `${job} (${plural(nodes, 'node')})`,
    larger: (group: string, limit: number, used: number) =>
      `A larger group: ${group} has at most ${plural(limit, 'node')}, and jobs use ${count(used)} of them.`,
    preemption: 'Preemption: Everstep stops preemptible jobs of lower priority by itself.',
  },
} as const

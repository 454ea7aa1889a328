/** The statuses of a job: their tones, their order by urgency, and what follows from them. Pure. */
import type { TrainingJob } from '../contract'
import { STATUS_WORDS } from '../words/statuses'

/** good: healthy. busy: in progress. warn: needs attention. bad: failed. idle: finished, or not started. */
export type Tone = 'good' | 'busy' | 'warn' | 'bad' | 'idle'

/** Every SecondaryStatus in the order of urgency. */
export const STATUSES: Readonly<Record<string, Tone>> = {
  Failed: 'bad',
  CompletedWithOlderCheckpoint: 'warn',
  Restarting: 'busy',
  Interrupted: 'warn',
  Paused: 'idle',
  Pending: 'idle',
  Starting: 'busy',
  Downloading: 'busy',
  Pausing: 'busy',
  Stopping: 'busy',
  Training: 'good',
  Stopped: 'idle',
  Completed: 'good',
} satisfies Record<TrainingJob['SecondaryStatus'], Tone>
const ORDER = Object.keys(STATUSES)

/** Return the word for a SecondaryStatus. A status that only a newer server knows is shown by its own name. */
export const statusWord = (status = 'Unknown'): string => WORDS[status] ?? status
const WORDS: Readonly<Record<string, string>> = STATUS_WORDS

/** Return the position of a status in `STATUSES`. A status that only a newer server knows comes last. */
export const urgency = (status: string): number => (ORDER.indexOf(status) + ORDER.length + 1) % (ORDER.length + 1)

const ENDED = new Set(['Completed', 'Failed', 'Stopped'])
export const isOver = (job: { TrainingJobStatus?: string }): boolean => ENDED.has(job.TrainingJobStatus ?? '')

type StatusFields = 'SecondaryStatus' | 'SecondaryStatusTransitions' | 'TrainingStartTime' | 'QueuePosition'
type JobStatus = Pick<Partial<TrainingJob>, StatusFields>

/**
 * Return Everstep's own state of a job.
 *
 * A status can stand for several states: an Interrupted job returns nodes, waits in the queue, or collects nodes.
 */
export const stateOf = (job: Pick<JobStatus, 'SecondaryStatusTransitions'>): string | undefined =>
  job.SecondaryStatusTransitions?.at(-1)?.State

/** Whether the job has trained and has no nodes now, so that no step of it is in memory. */
export const hasReleasedNodes = (job: JobStatus): boolean =>
  job.SecondaryStatus === 'Paused'
    ? job.TrainingStartTime !== undefined
    : job.SecondaryStatus === 'Interrupted' && ['queued', 'allocating'].includes(stateOf(job) ?? '')

/** Whether the job has a place in the queue. A paused job and one that still returns nodes have none. */
export const isQueued = (job: JobStatus): boolean =>
  job.SecondaryStatus === 'Pending' || (job.SecondaryStatus === 'Interrupted' && job.QueuePosition !== undefined)

/** Return the highest step of all launches of a job, or -1. */
export const reachedStep = (job: Pick<Partial<TrainingJob>, 'Boundary' | 'MaxBoundary'>): number =>
  Math.max(job.MaxBoundary ?? -1, job.Boundary ?? -1)

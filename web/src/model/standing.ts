/** The statuses of a job, and what follows from them. Pure. */
import type { TrainingJob } from '../contract'
import { STATUSES } from '../words/statuses'

/** good: healthy. busy: in progress. warn: needs attention. bad: failed. idle: finished, or not started. */
export type Tone = 'good' | 'busy' | 'warn' | 'bad' | 'idle'

/** The verdict in a page's head: `lead` is shown in the color of its tone, and `text` follows. */
export interface VerdictLine {
  tone: Tone
  lead: string
  text?: string
  /** Whether the request for the page's object failed, although the control plane answers others. */
  isStale?: boolean
}

/** Return the word and the tone of a SecondaryStatus. A status that only a newer server knows has its own name. */
export const statusOf = (status = 'Unknown'): { word: string; tone: Tone } =>
  STATUSES[status] ?? { word: status, tone: 'idle' }

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
    : (job.SecondaryStatus === 'Interrupted' || isStoppedLater(job)) &&
      ['queued', 'allocating'].includes(stateOf(job) ?? '')

/** Whether a user stops a job that has trained, for example while it is paused. */
const isStoppedLater = (job: JobStatus): boolean =>
  job.SecondaryStatus === 'Stopping' && job.TrainingStartTime !== undefined

/** Whether the job has a place in the queue. A paused job and one that still returns nodes have none. */
export const isQueued = (job: JobStatus): boolean =>
  job.SecondaryStatus === 'Pending' || (job.SecondaryStatus === 'Interrupted' && job.QueuePosition !== undefined)

/** Return the highest step of all launches of a job, or -1. */
export const reachedStep = (job: Pick<Partial<TrainingJob>, 'Boundary' | 'MaxBoundary'>): number =>
  Math.max(job.MaxBoundary ?? -1, job.Boundary ?? -1)

/** What the words for a job's status mean: how each looks, how soon it wants attention, and what follows from it. Pure. */
import type { DescribeProtectionResponse, Incident, TrainingJob } from '../contract'
import { count, plural } from './format'

/** good: all is well. busy: something is being done. warn: worth a look. bad: broken. idle: over, or not begun. */
export type Tone = 'good' | 'busy' | 'warn' | 'bad' | 'idle'

/** Every SecondaryStatus, in the order of a list: what wants attention comes first. */
export const STATUSES: Readonly<Record<string, Tone>> = {
  Failed: 'bad',
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

/** A place in that order; a word that a newer server adds comes last. */
export const urgency = (status: string): number => (ORDER.indexOf(status) + ORDER.length + 1) % (ORDER.length + 1)

const ENDED = new Set(['Completed', 'Failed', 'Stopped'])
export const isOver = (job: { TrainingJobStatus?: string }): boolean => ENDED.has(job.TrainingJobStatus ?? '')

type Told = Pick<Partial<TrainingJob>, 'SecondaryStatus' | 'SecondaryStatusTransitions' | 'TrainingStartTime' | 'QueuePosition'>

/** Everstep's own state of a job, finer than its status: Interrupted is said of one that gives its nodes back, that queues, and that collects nodes. */
export const stateOf = (job: Pick<Told, 'SecondaryStatusTransitions'>): string | undefined => job.SecondaryStatusTransitions?.at(-1)?.State

/** It has trained, and has let go of its nodes since: nothing of it is in memory. As the API's own rule for what a job keeps. */
export const hasLetGo = (job: Told): boolean =>
  job.SecondaryStatus === 'Paused' ? job.TrainingStartTime !== undefined : job.SecondaryStatus === 'Interrupted' && ['queued', 'allocating'].includes(stateOf(job) ?? '')

/** It waits for its turn: not one that a person paused, nor one that is still giving its nodes back. */
export const isQueued = (job: Told): boolean => job.SecondaryStatus === 'Pending' || (job.SecondaryStatus === 'Interrupted' && job.QueuePosition !== undefined)

/** What a person who has taken a job over leaves undone: Everstep recovers, pauses and stops nothing meanwhile. Ranks that train do so by themselves. */
export function leftUndone(job: Partial<TrainingJob>): string | undefined {
  if (job.TakenOverTime === undefined || isOver(job)) return undefined
  const seen = job.Reason?.split(SEEN)[1]
  if (seen) return seen
  if (job.TrainingJobStatus === 'Stopping') return 'the job was asked to stop'
  if (job.SecondaryStatus === 'Pausing') return 'the job was asked to pause'
  return job.SecondaryStatus === 'Training' || stateOf(job) === 'running' ? undefined : 'its ranks do not train'
}
/** Before what the control plane would act upon, in the reason of a job that was taken over. */
const SEEN = '; what it sees: '

/** The highest step that any launch of a job reached; -1: none. */
export const reachedStep = (job: Pick<Partial<TrainingJob>, 'Boundary' | 'MaxBoundary'>): number => Math.max(job.MaxBoundary ?? -1, job.Boundary ?? -1)

/** What a job that will not start again lost: steps that it had reached, against its newest checkpoint; undefined where it is not known what is kept. */
export function leftInS3(job: Pick<Partial<TrainingJob>, 'Boundary' | 'MaxBoundary'>, protection?: Partial<DescribeProtectionResponse>): { tone: Tone; title: string; text: string } | undefined {
  if (protection === undefined) return undefined
  const reached = reachedStep(job)
  const kept = protection.LastCheckpoint?.Step
  const lost = reached - (kept ?? 0)
  if (reached <= 0) return { tone: 'good', title: 'No step', text: 'It had made none.' }
  if (lost <= 0) return { tone: 'good', title: 'No step', text: `It had reached step ${count(reached)}, which is kept in S3.` }
  if (kept === undefined) return { tone: 'bad', title: reached === 1 ? 'Its one step' : `All ${plural(reached, 'step')}`, text: `It had reached step ${count(reached)}, and no checkpoint of it is left.` }
  return { tone: 'bad', title: plural(lost, 'step'), text: `It had reached step ${count(reached)}, and the checkpoint of step ${count(kept)} is what is left.` }
}

/** What ended an incident before training had made up for it: the job's own end, or a pause; undefined: nothing did. */
export function cutShortBy(incident: Incident, job: Partial<TrainingJob> | undefined): string | undefined {
  const closed = incident.ClosedAt
  if (closed === undefined || job === undefined || (job.RunId !== undefined && job.RunId !== incident.RunId)) return undefined
  const isThen = (at?: number) => at !== undefined && Math.abs(at - closed) <= SAME_MOMENT_SECONDS
  if (isThen(job.TrainingEndTime)) return job.TrainingJobStatus
  return job.SecondaryStatusTransitions?.some((each) => each.State === 'queued' && isThen(each.StartTime)) ? 'Paused' : undefined
}
/** Moments that one pass of the control plane stores may differ by what rounding does. */
const SAME_MOMENT_SECONDS = 1

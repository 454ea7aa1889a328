/** What the verdict on a job is made of: answers of the API, what this browser saw, and the time. */
import type { DescribeProtectionResponse, Event, Fleet, Incident, Node, TrainingJob } from '../contract'
import type { Tone } from './standing'

/** A node that waits for a person, perhaps, and why. */
export type HeldNode = Pick<Node, 'NodeId' | 'NodeStatus' | 'Hold'> & Partial<Pick<Node, 'Reason'>>

export interface Statement {
  tone: Tone
  /** A few words. */
  title: string
  /** A sentence or two. */
  text: string
}

export interface PhaseNow {
  incidentId: string
  phase: string
  cause: string
  elapsedSeconds: number
  /** How long this phase took in earlier incidents of the same cause: the median, where there were any. */
  usualSeconds?: number
  /** From this length on, the phase is late. */
  lateAfterSeconds: number
}

/** How a job's boundary moved while this browser looked: the API has no time of the last step, only of the last commit. */
export interface Progress {
  boundary: number
  /** Unix seconds. */
  movedAt?: number
  /** Steps per second lately, and normally. */
  rate?: number
  usualRate?: number
  /** Since when this browser has looked. */
  watchedSince: number
}

export interface Facts {
  job: Partial<TrainingJob> & Pick<TrainingJob, 'TrainingJobName'>
  protection?: Partial<DescribeProtectionResponse>
  incidents?: Incident[]
  fleet?: Partial<Fleet>
  events?: Event[]
  progress?: Progress
  /** Other jobs that the same fault has hit, by `hitAlike`. */
  othersHit?: string[]
  /** Nodes that this job's incidents have lost and that are still there. */
  heldNodes?: readonly HeldNode[]
  /** How old what is shown is: seconds since the server last said how this job is. */
  staleSeconds?: number
  /** What the server says instead, where it answers at all. */
  refusal?: string
  now: number
}

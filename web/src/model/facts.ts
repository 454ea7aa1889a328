/**
 * The facts from which `verdict.ts` derives the verdict on a job: its state, its protection, and what a person must do.
 *
 * The facts are answers of the API, observations of this page, and the time.
 */
import type { DescribeProtectionResponse, Fleet, Incident, IncidentAction, Node, TrainingJob } from '../contract'
import type { Tone } from './standing'

/** A node that an incident of the job lost and that still exists. */
export type HeldNode = Pick<Node, 'NodeId' | 'Hold' | 'HoldAdvice'>

export interface Statement {
  tone: Tone
  /** One to four words. */
  title: string
  /** One sentence or more. */
  text: string
}

/** The state of a job. `text` is the first sentence of the verdict, the line at the top of the job's page. */
export interface JobState extends Statement {
  /** Sentences that explain the state. Empty if nothing needs an explanation. */
  detail: string
}

/** The phase of the open incident. */
export interface PhaseNow {
  incidentId: string
  phase: string
  /** What happens in the phase. */
  words: string
  cause: string
  elapsedSeconds: number
  /** Median length of this phase in earlier incidents of the same cause. Absent without such incidents. */
  usualSeconds?: number
  /** The length from which the phase is late. */
  lateAfterSeconds: number
  isLate: boolean
}

/** How the step of a job changed while this page was open. The API has no time of the last step. */
export interface Progress {
  boundary: number
  /** Unix seconds of the last observed change. */
  movedAt?: number
  /** Steps per second over the last 30 s. */
  rate?: number
  /** Steps per second over the whole job. */
  usualRate?: number
  /** Unix seconds of the first observation. */
  watchedSince: number
}

export interface Facts {
  job: Partial<TrainingJob> & Pick<TrainingJob, 'TrainingJobName'>
  protection?: Partial<DescribeProtectionResponse>
  incidents?: Incident[]
  fleet?: Partial<Fleet>
  progress?: Progress
  /** Names of other jobs that the same fault hit, from `hitAlike`. */
  othersHit?: string[]
  heldNodes?: readonly HeldNode[]
  /** Actions of the job's latest incident that still apply, from DescribeIncident. */
  actions?: readonly IncidentAction[]
  /** Another job of the fleet whose pause would free nodes, the least important one. */
  pausable?: string
  /** Seconds since the server last described the job. */
  staleSeconds?: number
  /** The server's error, if it answers with errors only. */
  refusal?: string
  now: number
}

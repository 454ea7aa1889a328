/**
 * The facts from which `verdict.ts` derives the verdict on a job: its state, its protection, and what a person must do.
 *
 * The facts are answers of the API, observations of this page, and the time.
 */
import type { DescribeProtectionResponse, Fleet, Incident, TrainingJob } from '../contract'
import type { Tone } from './standing'

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
  /** What happens in the phase. */
  words: string
  elapsedSeconds: number
  /** Median length of this phase in earlier incidents of the same cause. Absent without such incidents. */
  usualSeconds?: number
}

/** How the step of a job changed while this page was open. The API has no time of the last step. */
export interface Progress {
  boundary: number
  /** Steps per second over the last 30 s. */
  rate?: number
  /** Steps per second over the whole job. */
  usualRate?: number
}

export interface Facts {
  job: Partial<TrainingJob> & Pick<TrainingJob, 'TrainingJobName' | 'Duty'>
  protection?: Partial<DescribeProtectionResponse>
  incidents?: Incident[]
  fleet?: Partial<Fleet>
  progress?: Progress
  /** Names of other jobs that the same fault hit, from `hitAlike`. */
  othersHit?: string[]
  /** Whether the last answer of the server is old. */
  isStale?: boolean
  now: number
}

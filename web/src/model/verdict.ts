/**
 * The verdict on a job: its state, what protects it, and what a person must do, in one line. Pure.
 *
 * The server decides what a person must do (`Duty`). This module states the facts that the API reports, and decides
 * nothing. A fact that the API does not report is left out, or is "unknown".
 */
import type { CapacityWait, DescribeProtectionResponse, Fleet, Incident, TrainingJob } from '../contract'
import { BANNERS, KEPT, STATE } from '../words/job'
import { toneOfDuty } from '../words/duty'
import { phaseWords } from './causes'
import { jobFigures, phaseLengths, shown, type JobFigures } from './figures'
import { ago, count, duration, headline, moment, percent, plural, sentence } from './format'
import { attemptWords, missingWords } from './incident'
import { isOver, reachedStep, hasReleasedNodes, stateOf, type Tone, type VerdictLine } from './standing'

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

/** How the step of a job changed while this page was open. The API has no time of the last step. */
export interface Progress {
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

export type Verdict = ReturnType<typeof verdict>

const TITLES = STATE.titles

/** Return the newest incident that is not closed. */
export const openIncident = (incidents: Incident[] = []): Incident | undefined =>
  incidents.filter((each) => each.ClosedAt === undefined).at(-1)

export function verdict(facts: Facts) {
  const { job } = facts
  const { Duty: duty } = job
  const figures = jobFigures(job, facts)
  const recovery = recoveryOf(facts)
  const hasNodes = isOver(job) || job.SecondaryStatus === 'Training'
  const wait = hasNodes ? undefined : job.CapacityWait
  const stated = stateOfJob(facts, figures, recovery, wait)
  const state = facts.isStale && stated.tone === 'good' ? { ...stated, tone: 'idle' as const } : stated
  const protection = protectionOf(facts, figures)
  /** The one line at the top of the page. `lead` is set in the color of `tone`. */
  const line: Required<VerdictLine> = {
    tone: duty.Urgency === 'Now' ? toneOfDuty(duty) : state.tone,
    lead: state.text,
    text: [state.detail, protectionInLine(facts, figures, protection, recovery), duty.Sentence]
      .filter(Boolean)
      .join(' '),
    isStale: facts.isStale ?? false,
  }
  return { figures, state, protection, recovery, duty, banners: bannersOf(facts), line }
}

/** Return the sentence about protection. It is empty for a waiting, starting or recovering job that risks no steps. */
function protectionInLine(
  { job }: Facts,
  figures: JobFigures,
  protection: Statement,
  recovery?: ReturnType<typeof recoveryOf>,
): string {
  if (job.SecondaryStatus === 'Pending' || (recovery !== undefined && protection.tone !== 'bad')) return ''
  return figures.protection === 'Not yet protected' && job.SecondaryStatus !== 'Training' ? '' : protection.text
}

const stated = (tone: Tone, title: string, text: string, detail = ''): JobState => ({ tone, title, text, detail })

function stateOfJob(
  facts: Facts,
  figures: JobFigures,
  recovery?: ReturnType<typeof recoveryOf>,
  wait?: CapacityWait,
): JobState {
  const { job, now } = facts
  const highest = reachedStep(job)
  const reached = highest >= 0 ? count(highest) : undefined
  const step = figures.step === undefined ? undefined : count(figures.step)
  const target = figures.doneRatio === undefined || figures.doneRatio >= 1 ? undefined : shown(figures, 'targetStep')
  const why = sentence(job.Reason ?? '')
  switch (job.TrainingJobStatus) {
    case 'Completed':
      if (job.SecondaryStatus === 'CompletedWithOlderCheckpoint') {
        return stated('warn', TITLES.completed, STATE.completed(reached && plural(highest, 'step'), target), why)
      }
      return stated(figures.statusTone, TITLES.completed, STATE.completed(reached && plural(highest, 'step'), target))
    case 'Failed': {
      const text = STATE.atStep(TITLES.failed, highest > 0 ? reached : undefined)
      return stated('bad', TITLES.failed, text, headline(job.FailureReason ?? job.Reason ?? ''))
    }
    case 'Stopped':
      return stated('idle', TITLES.stopped, STATE.atStep(TITLES.stopped, reached), why)
    case 'Stopping':
      return stated('busy', TITLES.stopping, STATE.atStep(TITLES.stopping, step), why)
  }
  if (isBeforeFirstStep(job)) return stateBeforeFirstStep(facts, recovery !== undefined)
  switch (job.SecondaryStatus) {
    case 'Training':
      return stateInTraining(facts, step, recovery !== undefined)
    case 'Paused':
      return stated('idle', TITLES.paused, STATE.atStep(TITLES.paused, reached), why)
    case 'Pending':
      return wait
        ? stateOfWait('idle', TITLES.queued, wait, now)
        : stated('idle', TITLES.queued, STATE.atStep(TITLES.queued), why)
    case undefined:
      return stated('idle', TITLES.unknown, STATE.unknown)
  }
  if (job.SecondaryStatus === 'Pausing' && !recovery) {
    return stated('busy', TITLES.pausing, STATE.atStep(TITLES.pausing, step), why)
  }
  if (job.SecondaryStatus === 'Interrupted' && !recovery) {
    const title = hasReleasedNodes(job) ? TITLES.interrupted : TITLES.returning
    return wait ? stateOfWait('warn', title, wait, now) : stated('warn', title, STATE.atStep(title, reached), why)
  }
  if (recovery || job.SecondaryStatus === 'Restarting') {
    if (job.Duty.Kind === 'TakenOver' && job.Duty.Urgency === 'Now') {
      const text = STATE.notRecovering(job.TakenOverBy ?? STATE.person)
      return stated('bad', TITLES.notRecovering, text, reached ? STATE.reached(reached) : '')
    }
    if (wait) return stateOfWait('busy', TITLES.recovering, wait, now)
    if (!recovery) return stated('busy', TITLES.recovering, STATE.atStep(TITLES.recovering), why)
    const { words, elapsedSeconds, usualSeconds } = recovery
    const usual = usualSeconds === undefined ? undefined : duration(usualSeconds)
    const text = STATE.recovering(words, duration(elapsedSeconds), usual)
    return stated(job.Duty.Kind === 'RecoveryLate' ? 'warn' : 'busy', TITLES.recovering, text, why)
  }
  if (wait) return stateOfWait('busy', TITLES.starting, wait, now)
  return stated('busy', TITLES.starting, STATE.atStep(TITLES.starting, step), why)
}

function stateOfWait(tone: Tone, title: string, wait: CapacityWait, now: number): JobState {
  const detail = STATE.nextAttempt(wait.IsOutOfCapacity, attemptWords(wait, now))
  return stated(tone, title, STATE.waiting(title, missingWords(wait)), detail)
}

function stateBeforeFirstStep({ job, now }: Facts, isRecovering: boolean): JobState {
  const since = job.SecondaryStatusTransitions?.at(-1)?.StartTime
  const age = since === undefined ? undefined : now - since
  const time = age === undefined ? STATE.unknownTime : duration(age)
  const highest = reachedStep(job)
  const detail = highest > (job.Boundary ?? -1) ? STATE.reached(count(highest)) : ''
  if (job.Duty.Kind === 'FirstStepLate') {
    return stated('warn', TITLES.stalled, STATE.stalledAtStart(time), detail)
  }
  return isRecovering
    ? stated('busy', TITLES.recovering, STATE.firstStepAgain(time), detail)
    : stated('busy', TITLES.starting, STATE.firstStep(time), detail)
}

function stateInTraining({ job, progress, now }: Facts, step: string | undefined, isRecovering: boolean): JobState {
  if (job.Duty.Kind === 'Stalled') {
    const text = STATE.stalled(step ?? '0', ago(Math.min(job.Duty.Since ?? now, now), now))
    return stated('warn', TITLES.stalled, text, sentence(job.Reason ?? ''))
  }
  if (isRecovering && step !== undefined) {
    return stated('busy', TITLES.recomputing, STATE.recomputing(step, count(reachedStep(job))))
  }
  const size = smallerSize(job)
  const text = STATE.training(step, size && STATE.onNodes(size), pace(progress))
  return stated(isRecovering ? 'busy' : size ? 'warn' : 'good', TITLES.training, text, size ? STATE.grows : '')
}

/** Return "3 of 4 nodes" for a launch on fewer nodes than the job asks for, and '' for any other launch. */
function smallerSize({ GenerationNodeCount: now, NodeCount: asked }: Partial<TrainingJob>): string {
  return now !== undefined && asked !== undefined && now < asked ? `${now} of ${plural(asked, 'node')}` : ''
}

/** Whether the ranks of the launch run and have made no step beyond the one from which they started. */
function isBeforeFirstStep(job: Partial<TrainingJob>): boolean {
  const { SecondaryStatus: status = '' } = job
  const isStarting = status === 'Starting' || status === 'Restarting'
  const doRanksRun = status === 'Training' || (isStarting && stateOf(job) === 'running')
  return doRanksRun && job.TrainingJobStatus === 'InProgress' && (job.Boundary ?? -1) <= (job.BaseStep ?? -1)
}

/** Return steps per second over the whole job. undefined before 10 steps and 30 s of training. */
export function usualRate(job: Partial<TrainingJob>): number | undefined {
  const seconds = job.AccountingSeconds?.['train'] ?? 0
  const steps = job.MaxBoundary ?? -1
  return seconds >= 30 && steps >= 10 ? steps / seconds : undefined
}

export const rateWords = (perSecond: number): string =>
  perSecond >= 1 ? STATE.rate.perSecond(perSecond.toFixed(1)) : STATE.rate.perStep(duration(1 / perSecond))

/** Return words about the job's pace for the top of its page. Empty from 80 % to 125 % of the usual pace. */
function pace({ rate, usualRate: usual }: Partial<Progress> = {}): string {
  if (!rate || !usual) return ''
  const ratio = rate / usual
  if (ratio > 0.8 && ratio < 1.25) return ''
  return ratio < 1 ? STATE.slower(percent(ratio)) : STATE.faster(ratio.toFixed(1))
}

function protectionOf({ job, protection }: Facts, figures: JobFigures): Statement {
  const title = figures.protection
  const said = (text: string, tone = figures.protectionTone): Statement => ({ tone, title, text })
  if (protection === undefined) return said(KEPT.unknown, 'idle')
  const kept = figures.checkpointStep
  const inS3 = kept === undefined ? KEPT.noCheckpoint : KEPT.checkpoint(count(kept))
  if (job.TrainingJobStatus === 'Failed') return lossOf(figures)
  if (isOver(job)) return said(inS3, 'idle')
  if (hasReleasedNodes(job)) return said(inS3, kept === undefined ? 'warn' : 'idle')
  switch (figures.protection) {
    case 'Not yet protected':
      return said(KEPT.notYet)
    case 'Unprotected':
      return said(
        figures.committedStep === undefined
          ? `${KEPT.unprotected} ${inS3}`
          : KEPT.unprotectedStep(sentence(protection.Reason || KEPT.tooFewCopies)),
      )
    case 'Unconfirmed':
      return said(KEPT.unconfirmed(shown(figures, 'healthyNodes'), shown(figures, 'wantedNodes')))
    case 'Degraded':
      return said(KEPT.degraded(sentence(protection.Reason || KEPT.tooFewCopies)))
    case 'Protected':
      return said(protectedWords(protection, figures))
    default:
      return said(KEPT.unknown)
  }
}

function protectedWords({ RecoveryOdds = [] }: NonNullable<Facts['protection']>, figures: JobFigures): string {
  if (figures.protectionTone === 'warn') return KEPT.noLoss
  const survived = RecoveryOdds.filter((each) => each.Probability >= 1).map((each) => each.LostNodes)
  return survived.length ? KEPT.survives(Math.max(...survived)) : sentence(figures.protection)
}

/** Return how many steps a failed job has lost: the steps after its newest checkpoint. */
function lossOf(figures: JobFigures): Statement {
  const { protection: title, reachedStep: reached = 0, checkpointStep: kept, unsavedSteps: unsaved = 0 } = figures
  if (reached <= 0) return { tone: 'idle', title, text: KEPT.noStep }
  if (kept === undefined) return { tone: 'bad', title, text: KEPT.lostAll(unsaved) }
  if (unsaved === 0) return { tone: 'idle', title, text: KEPT.lostNothing(count(reached)) }
  return { tone: 'warn', title, text: KEPT.lostSome(unsaved, count(kept)) }
}

/**
 * Return what happens in the phase of the open incident, and for how long so far.
 *
 * `usualSeconds`: median length of this phase in earlier incidents of the same cause, if there are any.
 */
function recoveryOf({ incidents = [], now }: Facts) {
  const incident = openIncident(incidents)
  if (incident === undefined) return undefined
  const { phase, seconds } = phaseLengths(incident, now).at(-1)!
  const earlier = incidents
    .filter((each) => each.ClosedAt !== undefined && each.Cause === incident.Cause)
    .map((each) => phaseLengths(each, now).find((length) => length.phase === phase)?.seconds)
    .filter((length): length is number => length !== undefined)
    .sort((a, b) => a - b)
  const usualSeconds = earlier.length ? earlier[Math.floor((earlier.length - 1) / 2)] : undefined
  return { words: phaseWords(incident.Phase, incident), elapsedSeconds: seconds, usualSeconds }
}

/** Return banners about a takeover, the job's fleet and other jobs, without the subject of the job's duty. */
function bannersOf({ job, fleet, othersHit = [] }: Facts): Statement[] {
  const banners: Statement[] = []
  const add = (title: string, text: string) => banners.push({ tone: 'warn', title, text: text.trim() })
  if (job.TakenOverTime !== undefined && job.Duty.Kind !== 'TakenOver' && !isOver(job)) {
    add(BANNERS.takenOver.title, BANNERS.takenOver.text(job.TakenOverBy ?? BANNERS.takenOver.person))
  }
  if (fleet?.Duty && !isOver(job) && fleet.Duty.Urgency === 'Now' && fleet.Duty.Kind !== job.Duty.Kind) {
    add(BANNERS.fleet(fleet.FleetName ?? ''), `${fleet.Duty.Sentence} ${fleet.Duty.Explanation ?? ''}`)
  }
  if (job.PurgeTime !== undefined) add(BANNERS.trash.title, BANNERS.trash.text(moment(job.PurgeTime)))
  if (fleet?.FleetStatus === 'deleting') add(BANNERS.deleting.title, BANNERS.deleting.text)
  if (othersHit.length) {
    const names = othersHit.slice(0, 5).join(', ')
    add(BANNERS.wider.title, BANNERS.wider.text(plural(othersHit.length, 'other job'), names))
  }
  return banners
}

/** Causes that affect one job only. If other jobs have the same cause, this shows no common fault. */
const OWN_CAUSES = new Set(['drill', 'requested', 'pause_failed'])
/** Seconds within which all affected jobs fail after a common fault, for example of a switch or a zone. */
const ALIKE_SECONDS = 300

/**
 * Return the names of other jobs that a common fault hit.
 *
 * Each of these jobs has an incident with the same cause as this job's open incident, and with a failure at about the
 * same time.
 */
export function hitAlike(
  job: Partial<TrainingJob>,
  open: Incident | undefined,
  incidents: readonly Incident[],
  runsOfFleet: ReadonlySet<string>,
): string[] {
  if (open === undefined || OWN_CAUSES.has(open.Cause)) return []
  const alike = incidents.filter(
    (each) =>
      each.RunId !== job.RunId &&
      runsOfFleet.has(each.RunId) &&
      each.Cause === open.Cause &&
      Math.abs(each.FailedAt - open.FailedAt) <= ALIKE_SECONDS,
  )
  return [...new Set(alike.map((each) => each.TrainingJobName))]
}

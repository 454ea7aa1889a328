/**
 * The verdict on a job: its state, what protects it, what a person must do, and one line that says all three. Pure.
 *
 * The verdict contains only what the API reports. A fact that the API does not report is left out, or is "unknown".
 */
import type { CapacityWait, Incident, TrainingJob } from '../contract'
import { BANNERS, KEPT, STATE } from '../words/job'
import { actOf, isLaunchSuspended, LATE_FACTOR, LATE_SECONDS, LEAST_LATE_SECONDS, type Act } from './act'
import { phaseWords } from './causes'
import type { Facts, JobState, PhaseNow, Progress, Statement } from './facts'
import { jobFigures, phaseLengths, shown, STALE_SECONDS, type JobFigures } from './figures'
import { ago, count, duration, headline, percent, plural, sentence } from './format'
import { attemptWords, missingWords } from './incident'
import { isOver, reachedStep, hasReleasedNodes, stateOf, unrecoveredReason, type Tone } from './standing'

export { isOver, STALE_SECONDS }
export type { Act, Facts, JobState, PhaseNow, Progress, Statement, Tone }

export interface Verdict {
  figures: JobFigures
  state: JobState
  protection: Statement
  recovery?: PhaseNow
  act: Act
  banners: Statement[]
  /** The one line at the top of the page. `lead` is set in the color of `tone`. */
  line: { tone: Tone; lead: string; text: string; namesOutage: boolean }
}

/** A running job is stalled after this many seconds without a step, or after ten usual steps if these take longer. */
const STALLED_SECONDS = 60
const STALLED_STEPS = 10
/** The limit in seconds for the first step of a launch, which includes imports, compilation and the first batches. */
const FIRST_STEP_SECONDS = 600

const TITLES = STATE.titles

/** Return the newest incident that is not closed. */
export const openIncident = (incidents: Incident[] = []): Incident | undefined =>
  incidents.filter((each) => each.ClosedAt === undefined).at(-1)

export function verdict(facts: Facts): Verdict {
  const { job } = facts
  const figures = jobFigures(job, facts)
  const recovery = recoveryOf(facts)
  const hasNodes = isOver(job) || job.SecondaryStatus === 'Training'
  const wait = hasNodes ? undefined : job.CapacityWait
  const fresh = stateOfJob(facts, figures, recovery, wait)
  const protection = protectionOf(facts, figures)
  const act = actOf(facts, {
    state: fresh,
    protection,
    recovery,
    wait,
    checkpointStep: figures.checkpointStep,
    isBeforeFirstStep: isBeforeFirstStep(job),
  })
  const isOld = (facts.staleSeconds ?? 0) > STALE_SECONDS
  const isStale = isOld && !isOver(job)
  const faded = isOld && fresh.tone === 'good' ? { ...fresh, tone: 'idle' as const } : fresh
  const state = isStale ? staleState(fresh, facts) : faded
  const kept = isStale
    ? { tone: 'idle' as const, title: TITLES.unknown, text: STATE.lastKnown(protection.text) }
    : protection
  const line = {
    tone: act.urgency === 'Now' ? act.tone : state.tone,
    lead: state.text,
    text: [state.detail, isStale ? '' : protectionInLine(facts, protection, recovery), act.brief]
      .filter(Boolean)
      .join(' '),
    namesOutage: isOld,
  }
  return { figures, state, protection: kept, recovery, act, banners: bannersOf(facts, act), line }
}

/** Return the sentence about protection. It is empty for a waiting, starting or recovering job that risks no steps. */
function protectionInLine({ job }: Facts, protection: Statement, recovery?: PhaseNow): string {
  if (job.SecondaryStatus === 'Pending' || (recovery !== undefined && protection.tone !== 'bad')) return ''
  return protection.title === 'Not yet protected' && job.SecondaryStatus !== 'Training' ? '' : protection.text
}

function staleState(known: JobState, { staleSeconds = 0, refusal }: Facts): JobState {
  const time = duration(staleSeconds)
  const text = refusal ? STATE.refused(time, sentence(refusal)) : STATE.stale(time)
  return { tone: 'idle', title: TITLES.unknown, text, detail: STATE.lastKnown(known.text) }
}

const stated = (tone: Tone, title: string, text: string, detail = ''): JobState => ({ tone, title, text, detail })

function stateOfJob(facts: Facts, figures: JobFigures, recovery?: PhaseNow, wait?: CapacityWait): JobState {
  const { job, now } = facts
  const highest = reachedStep(job)
  const reached = highest >= 0 ? count(highest) : undefined
  const step = figures.step === undefined ? undefined : count(figures.step)
  const why = sentence(job.Reason ?? '')
  switch (job.TrainingJobStatus) {
    case 'Completed':
      if (job.SecondaryStatus === 'CompletedWithOlderCheckpoint') {
        return stated('warn', TITLES.completed, STATE.completed(reached && plural(highest, 'step')), why)
      }
      return stated('good', TITLES.completed, STATE.completed(reached && plural(highest, 'step')))
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
      return stateInTraining(facts, recovery !== undefined)
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
    if (unrecoveredReason(job)) {
      const text = STATE.notRecovering(job.TakenOverBy ?? STATE.person)
      return stated('bad', TITLES.notRecovering, text, reached ? STATE.reached(reached) : '')
    }
    if (wait) return stateOfWait('busy', TITLES.recovering, wait, now)
    if (!recovery) return stated('busy', TITLES.recovering, STATE.atStep(TITLES.recovering), why)
    const { words, elapsedSeconds, usualSeconds } = recovery
    const usual = usualSeconds === undefined ? undefined : duration(usualSeconds)
    const text = STATE.recovering(words, duration(elapsedSeconds), usual)
    return stated(recovery.isLate ? 'warn' : 'busy', TITLES.recovering, text, why)
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
  if (age !== undefined && age > FIRST_STEP_SECONDS) {
    return stated('warn', TITLES.stalled, STATE.stalledAtStart(time), detail)
  }
  return isRecovering
    ? stated('busy', TITLES.recovering, STATE.firstStepAgain(time), detail)
    : stated('busy', TITLES.starting, STATE.firstStep(time), detail)
}

function stateInTraining({ job, progress, protection, now }: Facts, isRecovering: boolean): JobState {
  const step = (job.Boundary ?? -1) >= 0 ? count(job.Boundary!) : undefined
  const moved = newest(progress?.movedAt, protection?.CommittedAt)
  const watched = progress === undefined ? 0 : now - progress.watchedSince
  const limit = Math.max(STALLED_SECONDS, progress?.usualRate ? STALLED_STEPS / progress.usualRate : 0)
  if ((moved === undefined ? watched : now - moved) > limit) {
    const at = step ?? '0'
    const text =
      moved === undefined
        ? STATE.stalledUnseen(at, ago(progress!.watchedSince, now))
        : STATE.stalled(at, ago(Math.min(moved, now), now))
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

function newest(...moments: (number | undefined)[]): number | undefined {
  const present = moments.filter((at): at is number => at !== undefined)
  return present.length ? Math.max(...present) : undefined
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
          : KEPT.unprotectedStep(clause(protection.Reason)),
      )
    case 'Unconfirmed':
      return said(KEPT.unconfirmed(shown(figures, 'healthyNodes'), shown(figures, 'wantedNodes')))
    case 'Degraded':
      return said(KEPT.degraded(clause(protection.Reason)))
    case 'Protected':
      return said(protectedWords(protection, figures))
    default:
      return said(KEPT.unknown)
  }
}

/** Return a reason from the API with a lower-case first letter, so that it can follow a colon. */
const clause = (reason = ''): string =>
  reason ? sentence(reason).replace(/^./, (letter) => letter.toLowerCase()) : KEPT.tooFewCopies

function protectedWords({ RecoveryOdds = [] }: NonNullable<Facts['protection']>, figures: JobFigures): string {
  if (figures.protectionTone === 'warn') return KEPT.noLoss
  const survived = RecoveryOdds.filter((each) => each.Probability >= 1).map((each) => each.LostNodes)
  return survived.length ? KEPT.survives(Math.max(...survived)) : sentence(figures.protection)
}

/** Return how many steps a failed job has lost: the steps after its newest checkpoint. */
function lossOf(figures: JobFigures): Statement {
  const { protection: title, reachedStep: reached = 0, checkpointStep: kept, unsavedSteps: unsaved = 0 } = figures
  const lost = plural(unsaved, 'step')
  if (reached <= 0) return { tone: 'idle', title, text: KEPT.noStep }
  if (kept === undefined) return { tone: 'bad', title, text: KEPT.lostAll(lost) }
  if (unsaved === 0) return { tone: 'idle', title, text: KEPT.lostNothing(count(reached)) }
  return { tone: 'warn', title, text: KEPT.lostSome(lost, count(kept)) }
}

function recoveryOf({ incidents = [], now }: Facts): PhaseNow | undefined {
  const incident = openIncident(incidents)
  if (incident === undefined) return undefined
  const current = phaseLengths(incident, now).at(-1)!
  const earlier = incidents
    .filter((each) => each.ClosedAt !== undefined && each.Cause === incident.Cause)
    .map((each) => phaseLengths(each, now).find((length) => length.phase === current.phase)?.seconds)
    .filter((seconds): seconds is number => seconds !== undefined)
    .sort((a, b) => a - b)
  const usualSeconds = earlier.length ? earlier[Math.floor((earlier.length - 1) / 2)] : undefined
  const lateAfterSeconds =
    usualSeconds === undefined ? LATE_SECONDS : Math.max(LEAST_LATE_SECONDS, LATE_FACTOR * usualSeconds)
  return {
    incidentId: incident.IncidentId,
    phase: incident.Phase,
    words: phaseWords(incident.Phase, incident),
    cause: incident.Cause,
    elapsedSeconds: current.seconds,
    usualSeconds,
    lateAfterSeconds,
    isLate: current.seconds > lateAfterSeconds,
  }
}

/** Return banners about a takeover, the job's fleet and other jobs, without the banner whose subject `act` states. */
function bannersOf({ job, fleet, othersHit = [] }: Facts, act: Act): Statement[] {
  const banners: Statement[] = []
  const add = (title: string, text: string) => banners.push({ tone: 'warn', title, text: text.trim() })
  if (job.TakenOverTime !== undefined && act.about !== 'takenOver' && !isOver(job)) {
    add(BANNERS.takenOver.title, BANNERS.takenOver.text(job.TakenOverBy ?? BANNERS.takenOver.person))
  }
  if (fleet?.FleetStatus === 'frozen' && act.about !== 'frozen') {
    const drift = (fleet.Drift ?? []).map(sentence).join(' ')
    add(BANNERS.frozen.title(fleet.FleetName ?? ''), `${BANNERS.frozen.text} ${sentence(fleet.Reason ?? '')} ${drift}`)
  }
  if (isLaunchSuspended(fleet) && act.about !== 'suspended') {
    add(BANNERS.suspended.title(fleet?.FleetName ?? ''), sentence(fleet?.Reason ?? ''))
  }
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

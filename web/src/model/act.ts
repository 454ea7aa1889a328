/** What a person must or can do for a job. Pure. The first rule that applies decides. `duty.ts` decides the urgency. */
import type { CapacityWait, IncidentAction } from '../contract'
import { ACT, STATE } from '../words/job'
import { logsCommand } from '../words/commands'
import { DUTIES, DUTY } from '../words/duty'
import {
  decision,
  dutySentence,
  nodeSteps,
  stepsOf,
  urgencyOf,
  withResubmission,
  type Step,
  type Urgency,
} from './duty'
import { STALE_SECONDS } from './figures'
import { ago, clock, duration, minute, sentence } from './format'
import { attemptWords } from './incident'
import type { Facts, JobState, PhaseNow, Statement } from './facts'
import { isOver, hasReleasedNodes, unrecoveredReason, type Tone } from './standing'

export interface Act extends Statement {
  urgency: Urgency
  /** The last sentence of the verdict on the job (see `verdict.ts`): "Nothing to do." or "Act now: …". */
  brief: string
  /** What to do, the most urgent first. */
  steps: Step[]
  /** The section of docs/runbook.md about this situation. */
  section?: string
  /** The banner that would repeat this act. The job's page omits that banner. */
  about?: 'takenOver' | 'frozen' | 'suspended'
}

/** A phase of an incident is late after this many times its usual length. */
export const LATE_FACTOR = 3
/** Seconds after which a phase is late if the job had no earlier incident of the same cause. */
export const LATE_SECONDS = 300
/** Seconds before which no phase is late, however short its usual length is. */
export const LEAST_LATE_SECONDS = 30

/** Values that `verdict` derives from the facts before it applies the rules of this module. */
export interface Derived {
  state: JobState
  protection: Statement
  recovery?: PhaseNow
  isBeforeFirstStep: boolean
  /** Present while AWS launches no instance for the job. */
  wait?: CapacityWait
  /** Step of the newest checkpoint. */
  checkpointStep?: number
}

/** What a rule decides. Without `title` and `brief`, these follow from the urgency of the steps. */
type Rule = Pick<Act, 'tone' | 'text'> & Partial<Pick<Act, 'title' | 'brief' | 'steps' | 'section' | 'about'>>

type Urged = IncidentAction['Urgency']
const step = (urgency: Urged, text: string, ...commands: string[]): Step => ({ urgency, text, commands })

interface Must {
  section: string
  tone: Tone
  /** What to do, as a clause in the imperative. */
  brief: string
  text: string
  steps: Step[]
  about?: Act['about']
}
const must = ({ brief, ...rule }: Must): Rule => ({ ...rule, brief: DUTY.now(brief) })
const none = (text: string, tone: Tone = 'good', more: Partial<Rule> = {}): Rule => ({ text, tone, ...more })

export function actOf(facts: Facts, derived: Derived): Act {
  const rule = ofStalePage(facts) ?? withHeldNodes(withOptionalSteps(ruleOf(facts, derived), facts), facts)
  const steps = rule.steps ?? []
  const urgency = urgencyOf(steps)
  const tone = urgency === 'Later' && rule.tone === 'good' ? DUTIES.Later.tone : rule.tone
  return { title: DUTIES[urgency].title, brief: dutySentence(steps), ...rule, tone, urgency, steps }
}

function ruleOf(facts: Facts, derived: Derived): Rule {
  const { job, fleet } = facts
  const { recovery, wait } = derived
  const rule = ofEndedJob(facts, derived) ?? ofPersonsJob(job)
  if (rule) return rule
  if (fleet?.FleetStatus === 'frozen') return ofFrozenFleet(facts, recovery !== undefined)
  if (recovery) {
    if (isLaunchSuspended(fleet)) return ofSuspendedLaunches(facts, true)
    return wait ? ofShortage(facts, wait) : ofRecovery(facts, recovery)
  }
  const present = wait ? ofShortage(facts, wait) : ofTraining(facts, derived)
  const isUrgent = urgencyOf(present.steps ?? []) === 'Now'
  return isLaunchSuspended(fleet) && !isUrgent ? ofSuspendedLaunches(facts, false) : present
}

function ofFrozenFleet({ job, fleet }: Facts, isRecovering: boolean): Rule {
  const words = ACT.frozen
  const drift = (fleet?.Drift ?? []).map((each) => step('Now', words.drift(sentence(each))))
  const name = job.FleetName ?? fleet?.FleetName ?? ''
  return must({
    section: 'frozen-fleet',
    tone: isRecovering ? 'bad' : 'warn',
    brief: drift.length ? words.briefOfDrift : words.brief,
    text: `${isRecovering ? words.recovering : words.training} ${sentence(fleet?.Reason ?? '')}`.trim(),
    steps: drift.length ? drift : [step('Now', words.see, `everstep fleets describe ${name}`)],
    about: 'frozen',
  })
}

function ofSuspendedLaunches({ job, fleet }: Facts, isRecovering: boolean): Rule {
  const words = ACT.suspended
  const group = fleet?.AutoScalingGroupName
  const isWaiting = job.SecondaryStatus === 'Pending' || job.SecondaryStatus === 'Interrupted'
  return must({
    section: isWaiting && !isRecovering ? 'pending' : 'late-recovery',
    tone: isRecovering ? 'bad' : 'warn',
    brief: words.brief,
    text: isRecovering ? words.recovering : isWaiting ? words.waiting : words.training,
    steps: [step('Now', words.resume, ...(group === undefined ? [] : [words.command(group)]))],
    about: 'suspended',
  })
}

/** Whether a person must end a suspension of the Auto Scaling group's launches. Everstep ends suspensions by AWS. */
export const isLaunchSuspended = (fleet: Facts['fleet']): boolean => (fleet?.Reason ?? '').includes(RESUMED_BY_A_PERSON)

/** Words in a fleet's Reason that show a suspension by a person (`waiting_words`, control_plane/core/capacity.py). */
export const RESUMED_BY_A_PERSON = 'resume the process to launch instances'

function ofStalePage({ staleSeconds = 0, refusal }: Facts): Rule | undefined {
  if (staleSeconds <= STALE_SECONDS) return undefined
  const words = ACT.noNews
  return must({
    section: 'no-news',
    tone: 'warn',
    brief: words.brief,
    text: words.text,
    steps: [step('Now', refusal ? words.log : words.check)],
  })
}

function ofEndedJob({ job, actions, protection }: Facts, { checkpointStep }: Derived): Rule | undefined {
  if (!isOver(job)) return undefined
  if (job.TrainingJobStatus === 'Completed') return none(ACT.ended.completed)
  if (job.TrainingJobStatus === 'Stopped') return none(ACT.ended.stopped, 'idle')
  const words = ACT.failed
  const named = stepsOf(actions, job.RunId).filter((each) => each.urgency === 'Now')
  const own = [step('Now', words.read, logsCommand(job.TrainingJobName))]
  return must({
    section: 'failed',
    tone: 'bad',
    brief: words.brief,
    text: words.text,
    steps: withResubmission(named.length ? named : own, protection === undefined ? {} : job, checkpointStep),
  })
}

/** The rule if a person has taken over or paused the job, so that Everstep does nothing by itself. */
function ofPersonsJob(job: Facts['job']): Rule | undefined {
  const name = job.TrainingJobName
  if (job.TakenOverTime !== undefined) {
    const words = ACT.takenOver
    const person = job.TakenOverBy ?? 'a person'
    const undone = unrecoveredReason(job)
    const command = `everstep jobs hand-back ${name}`
    if (undone) {
      return must({
        section: 'taken-over',
        tone: 'bad',
        brief: words.brief,
        text: words.undone(person, undone.replace(/\.$/, '')),
        steps: [step('Now', words.ask(person), command)],
        about: 'takenOver',
      })
    }
    const waits = words.waits(person)
    const steps = [step('Optional', words.handBack, command)]
    return none(waits, 'warn', { brief: waits, steps, section: 'taken-over', about: 'takenOver' })
  }
  if (job.SecondaryStatus === 'Paused') {
    const words = ACT.paused
    const more = hasReleasedNodes(job) ? words.keep : words.notStarted
    const steps = [step('Later', words.resume, `everstep jobs resume ${name}`)]
    return none(`${words.text} ${more}`, 'idle', { title: words.title, brief: words.brief, steps, section: 'paused' })
  }
  return job.TrainingJobStatus === 'Stopping' ? none(ACT.stopping, 'busy') : undefined
}

/** The rule while AWS launches no instance: a person can wait, or free a node of another job. */
function ofShortage({ job, fleet, pausable, actions, now }: Facts, wait: CapacityWait): Rule {
  const words = ACT.shortage
  const name = job.FleetName ?? fleet?.FleetName ?? ''
  const command =
    fleet?.SparePolicy === undefined
      ? `everstep fleets update ${name} --spare-count ${(fleet?.SpareCount ?? 0) + 1}`
      : `everstep fleets describe ${name}`
  const free = pausable === undefined ? [] : [step('Optional', words.free(pausable), `everstep jobs pause ${pausable}`)]
  const choice = stepsOf(actions, job.RunId).find((each) => each.urgency === 'Later' && each.nodeId === undefined)
  return none(shortageWords(wait, now), choice ? 'warn' : 'busy', {
    ...(choice ? { title: DUTY.decision } : {}),
    brief: choice ? decision(choice) : words.brief(`${minute(wait.NextAttemptTime)} UTC`),
    // If the API names actions, show these only, so that all of them fit on one screen.
    steps: actions?.length ? [] : [...free, step('Optional', words.spare, command)],
    section: 'late-recovery',
  })
}

/** Return what AWS lacks, when Everstep tries again, and AWS's own message, in sentences. */
function shortageWords(wait: CapacityWait, now: number): string {
  const words = ACT.shortage
  const lack = words.text(wait.InstanceType || words.type, wait.AvailabilityZone || words.zone)
  const attempt = words.attempt(attemptWords(wait, now), clock(wait.NextAttemptTime))
  return [wait.IsOutOfCapacity ? lack : words.none, attempt, words.said(sentence(wait.Message))].join(' ')
}

function ofRecovery({ job, fleet }: Facts, recovery: PhaseNow): Rule {
  if (!recovery.isLate) return none(ACT.recovering, 'busy', { section: recovery.cause })
  const words = ACT.late
  const why = recovery.usualSeconds === undefined ? words.noUsual : words.usual(duration(recovery.usualSeconds))
  const name = job.TrainingJobName
  const first =
    recovery.phase === 'replace'
      ? step('Now', words.fleet, `everstep fleets describe ${job.FleetName ?? fleet?.FleetName ?? ''}`)
      : step('Now', words.logs, logsCommand(name))
  return must({
    section: 'late-recovery',
    tone: 'warn',
    brief: words.brief,
    text: words.text(duration(recovery.lateAfterSeconds), why),
    steps: [first, step('Now', words.events, `everstep events list --job ${name}`)],
  })
}

/** Up to this step, an unprotected job is no problem, because the first commit takes a few steps. */
const FIRST_STEPS = 3

function ofTraining({ job, progress, now }: Facts, { state, protection, isBeforeFirstStep }: Derived): Rule {
  const isTraining = job.SecondaryStatus === 'Training'
  const name = job.TrainingJobName
  if (state.title === STATE.titles.stalled) {
    const words = ACT.stalled
    return must({
      section: 'standing-still',
      tone: 'warn',
      brief: words.brief,
      text: words.text,
      steps: [step('Now', words.logs, logsCommand(name)), step('Optional', words.stop, `everstep jobs stop ${name}`)],
    })
  }
  if (progress?.rate && progress.usualRate && progress.rate < 0.5 * progress.usualRate && isTraining) {
    const { brief, text, compare } = ACT.slow
    return must({ section: 'slow', tone: 'warn', brief, text, steps: [step('Now', compare)] })
  }
  if (job.SecondaryStatus === 'Pending') {
    const most = job.StoppingCondition?.MaxPendingTimeInSeconds
    const limit = most && job.CreationTime ? ago(job.CreationTime + most, now) : undefined
    return none(ACT.queued(limit), 'idle', { section: 'pending' })
  }
  if (job.SecondaryStatus === 'Interrupted') {
    return none(hasReleasedNodes(job) ? ACT.interrupted : ACT.returning, 'idle', { section: 'interrupted' })
  }
  if (job.SecondaryStatus === 'Pausing') return none(ACT.pausing, 'busy', { section: 'paused' })
  if (protection.tone === 'bad' && isTraining && (job.Boundary ?? -1) > FIRST_STEPS) {
    const { brief, text, see } = ACT.unprotected
    return must({ section: 'unprotected', tone: 'warn', brief, text, steps: [step('Now', see)] })
  }
  if (protection.tone === 'warn' && isTraining) {
    return none(weakWords(protection.title), 'warn', { section: 'unprotected' })
  }
  if (isBeforeFirstStep) return none(ACT.firstStep, 'busy')
  if (!isTraining) return none(ACT.starting, 'busy')
  return protection.tone === 'idle' ? none(ACT.beforeCommit, 'idle') : none(ACT.training)
}

/** Return the sentence about a job that is protected only in part. `word`: its ProtectionWord, never Unprotected. */
function weakWords(word: string): string {
  if (word === 'Unconfirmed') return ACT.weak.unconfirmed
  return word === 'Degraded' ? ACT.weak.degraded : ACT.weak.oneCopy
}

/** Add the API's steps for the latest incident, except urgent steps and steps for held nodes: other rules add these. */
function withOptionalSteps(rule: Rule, { actions, job }: Facts): Rule {
  const optional = stepsOf(actions, job.RunId).filter((each) => each.urgency !== 'Now' && each.nodeId === undefined)
  return optional.length ? { ...rule, steps: [...(rule.steps ?? []), ...optional] } : rule
}

/** Add steps for the nodes that the job's incidents lost and that only a person can release or terminate. */
function withHeldNodes(rule: Rule, { heldNodes = [] }: Pick<Facts, 'heldNodes'>): Rule {
  const held = nodeSteps(heldNodes)
  if (!held.length) return rule
  const before = rule.steps ?? []
  const steps = [...before, ...held]
  if (urgencyOf(before) === 'Now') return { ...rule, steps }
  const brief = [rule.brief, dutySentence(held)].filter(Boolean).join(' ')
  return { ...rule, steps, brief, section: 'held-node' }
}

/** Return the nodes that the incidents lost. */
export function lostBy<T extends { NodeId: string }>(
  incidents: readonly { InstanceIds?: string[] }[],
  nodes: readonly T[],
): T[] {
  const lost = new Set(incidents.flatMap((each) => each.InstanceIds ?? []))
  return nodes.filter((node) => lost.has(node.NodeId))
}

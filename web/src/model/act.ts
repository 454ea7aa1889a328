/** What a person must do for a job, or can do later. Pure. The first rule that applies decides. */
import type { Node } from '../contract'
import { ACT, STATE } from '../words/job'
import { capacityWords, type CapacityWait } from './capacity'
import { STALE_SECONDS } from './figures'
import { ago, count, duration, minute, plural, sentence } from './format'
import type { Facts, HeldNode, JobState, PhaseNow, Statement } from './facts'
import { adviceOn, waitsForAPerson } from './nodes'
import { isOver, hasReleasedNodes, unrecoveredReason, type Tone } from './standing'

export interface Act extends Statement {
  /** The job does not continue, or is at risk, until a person acts. */
  needed: boolean
  /** The last sentence of the verdict: "Nothing to do." or "Act now: …". */
  brief: string
  /** What to do, in order. May be present if nothing is urgent. */
  steps: string[]
  /** The section of docs/runbook.md. */
  section?: string
  /** The subject, if a banner could repeat it. */
  about?: 'takenOver' | 'frozen' | 'suspended'
  /** Held nodes that `steps` name. */
  nodes?: { fleet?: string; ids: string[] }
}

/** A phase is late after this many times its usual length. */
export const LATE_FACTOR = 3
/** The limit without an earlier incident of the same cause. */
export const LATE_SECONDS = 300
/** A phase is never late before this time. */
export const LEAST_LATE_SECONDS = 30

/** What `verdict` has derived before. */
export interface Derived {
  state: JobState
  protection: Statement
  recovery?: PhaseNow
  isBeforeFirstStep: boolean
  /** Present while AWS launches no instance for the job. */
  wait?: CapacityWait
}

type More = Partial<Pick<Act, 'title' | 'brief' | 'steps' | 'section' | 'about'>>

const must = (section: string, tone: Tone, brief: string, text: string, steps: string[], more: More = {}): Act => ({
  needed: true, tone, title: ACT.titles.now, brief: ACT.now(brief), text, steps, section, ...more,
})
const none = (text: string, tone: Tone = 'good', more: More = {}): Act => ({
  needed: false, tone, title: ACT.titles.none, brief: ACT.nothing, text, steps: [], ...more,
})

export function actOf(facts: Facts, derived: Derived): Act {
  const { job, fleet } = facts
  const { recovery, wait } = derived
  const act = ofStalePage(facts) ?? ofEndedJob(facts) ?? ofPersonsJob(job)
  if (act) return act
  if (fleet?.FleetStatus === 'frozen') return ofFrozenFleet(facts, recovery !== undefined)
  if (recovery) {
    if (isLaunchSuspended(fleet)) return ofSuspendedLaunches(facts, true)
    return withHeldNodes(wait ? ofShortage(facts, wait) : ofRecovery(facts, recovery), facts)
  }
  const present = wait ? ofShortage(facts, wait) : ofTraining(facts, derived)
  return isLaunchSuspended(fleet) && !present.needed ? ofSuspendedLaunches(facts, false) : withHeldNodes(present, facts)
}

function ofFrozenFleet({ fleet }: Facts, isRecovering: boolean): Act {
  const words = ACT.frozen
  const steps = (fleet?.Drift ?? []).map((drift) => words.drift(sentence(drift)))
  const text = `${isRecovering ? words.recovering : words.training} ${sentence(fleet?.Reason ?? '')}`.trim()
  return must('frozen-fleet', isRecovering ? 'bad' : 'warn', words.brief, text, steps.length ? steps : [words.see], { about: 'frozen' })
}

function ofSuspendedLaunches({ job, fleet }: Facts, isRecovering: boolean): Act {
  const words = ACT.suspended
  const steps = [words.resume(fleet?.AutoScalingGroupName ?? '…')]
  const act = (section: string, tone: Tone, text: string) => must(section, tone, words.brief, text, steps, { about: 'suspended' })
  if (isRecovering) return act('late-recovery', 'bad', words.recovering)
  if (job.SecondaryStatus === 'Pending' || job.SecondaryStatus === 'Interrupted') return act('pending', 'warn', words.waiting)
  return act('late-recovery', 'warn', words.training)
}

/** Whether a person has suspended the group's launches while it lacks instances. Everstep lifts a suspension by AWS. */
export const isLaunchSuspended = (fleet: Facts['fleet']): boolean => (fleet?.Reason ?? '').includes(RESUMED_BY_A_PERSON)

/** Words of `waiting_words` (control_plane/core/capacity.py). */
export const RESUMED_BY_A_PERSON = 'resume the process to launch instances'

function ofStalePage({ staleSeconds = 0, refusal }: Facts): Act | undefined {
  if (staleSeconds <= STALE_SECONDS) return undefined
  const words = ACT.noNews
  return must('no-news', 'warn', words.brief, words.text, [refusal ? words.log : words.check])
}

function ofEndedJob(facts: Facts): Act | undefined {
  const { job, protection } = facts
  if (!isOver(job)) return undefined
  if (job.TrainingJobStatus === 'Completed') return withHeldNodes(none(ACT.ended.completed), facts)
  if (job.TrainingJobStatus === 'Stopped') return withHeldNodes(none(ACT.ended.stopped, 'idle'), facts)
  const words = ACT.failed
  const kept = protection?.LastCheckpoint
  const steps = [words.read, `${words.submit} ${kept ? words.resume(count(kept.Step)) : words.noCheckpoint}`]
  return withHeldNodes(must('failed', 'bad', words.brief, words.text, steps), facts)
}

/** A person has taken over or paused the job, so nothing happens by itself. */
function ofPersonsJob(job: Facts['job']): Act | undefined {
  const name = job.TrainingJobName
  if (job.TakenOverTime !== undefined) {
    const words = ACT.takenOver
    const person = job.TakenOverBy ?? 'a person'
    const undone = unrecoveredReason(job)
    const handBack = words.handBack(name)
    if (undone) {
      const text = words.undone(person, undone.replace(/\.$/, ''))
      return must('taken-over', 'bad', words.brief, text, [words.ask(person), handBack], { about: 'takenOver' })
    }
    const waits = words.waits(person)
    return none(waits, 'warn', { brief: waits, steps: [handBack], section: 'taken-over', about: 'takenOver' })
  }
  if (job.SecondaryStatus === 'Paused') {
    const words = ACT.paused
    const steps = [words.resume(name), hasReleasedNodes(job) ? words.keep : words.notStarted]
    return must('paused', 'idle', '', words.text, steps, { title: ACT.titles.person, brief: words.brief })
  }
  return job.TrainingJobStatus === 'Stopping' ? none(ACT.stopping, 'busy') : undefined
}

/** AWS launches no instance. A person can wait, or free a node of another job. */
function ofShortage({ job, fleet }: Facts, wait: CapacityWait): Act {
  const words = ACT.shortage
  const name = job.FleetName ?? fleet?.FleetName ?? 'FLEET'
  const command = fleet?.SparePolicy === undefined
    ? `everstep fleets update ${name} --spare-count ${(fleet?.SpareCount ?? 0) + 1}`
    : `everstep fleets describe ${name}`
  return none(capacityWords(wait, fleet), 'busy', {
    brief: ACT.nothingUntil(`${minute(wait.retryAt)} UTC`), steps: [words.free, words.spare(command)], section: 'late-recovery',
  })
}

function ofRecovery({ job, fleet }: Facts, recovery: PhaseNow): Act {
  if (!recovery.isLate) return none(ACT.recovering, 'busy', { section: recovery.cause })
  const words = ACT.late
  const why = recovery.usualSeconds === undefined ? words.noUsual : words.usual(duration(recovery.usualSeconds))
  return must('late-recovery', 'warn', words.brief, words.text(duration(recovery.lateAfterSeconds), why), [
    recovery.phase === 'replace'
      ? words.fleet(job.FleetName ?? fleet?.FleetName ?? 'FLEET')
      : words.logs(job.TrainingJobName),
    words.events(job.TrainingJobName),
  ])
}

/** The steps of a launch before an unprotected job is a problem: the first commit takes a moment. */
const FIRST_STEPS = 3

function ofTraining({ job, progress, now }: Facts, { state, protection, isBeforeFirstStep }: Derived): Act {
  const isTraining = job.SecondaryStatus === 'Training'
  if (state.title === STATE.titles.stalled) {
    const words = ACT.stalled
    return must('standing-still', 'warn', words.brief, words.text, [words.logs, words.stop(job.TrainingJobName)])
  }
  if (progress?.rate && progress.usualRate && progress.rate < 0.5 * progress.usualRate && isTraining) {
    return must('slow', 'warn', ACT.slow.brief, ACT.slow.text, [ACT.slow.compare])
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
    const words = ACT.unprotected
    return must('unprotected', 'warn', words.brief, words.text, [words.see])
  }
  if (protection.tone === 'warn' && isTraining) return none(weakWords(protection.title), 'warn', { section: 'unprotected' })
  if (isBeforeFirstStep) return none(ACT.firstStep, 'busy')
  if (!isTraining) return none(ACT.starting, 'busy')
  return protection.tone === 'idle' ? none(ACT.beforeCommit, 'idle') : none(ACT.training)
}

/** `word`: the job's ProtectionWord, which is not Unprotected. */
function weakWords(word: string): string {
  if (word === 'Unconfirmed') return ACT.weak.unconfirmed
  return word === 'Degraded' ? ACT.weak.degraded : ACT.weak.oneCopy
}

/** Nodes that the job's incidents lost, and that only a person can release or end. */
function withHeldNodes(act: Act, { job, heldNodes = [] }: Facts): Act {
  const held = heldNodes.filter(waitsForAPerson)
  if (!held.length) return act
  const words = ACT.held
  const nodes = { fleet: job.FleetName, ids: held.map((node) => node.NodeId) }
  const steps = [...act.steps, ...held.map(stepOf)]
  if (act.needed) return { ...act, steps, nodes }
  const lost = held.length === 1 ? words.one : words.many(plural(held.length, 'node'))
  const brief = `${act.brief === ACT.nothing ? '' : `${act.brief} `}${ACT.canWait(plural(held.length, 'held node'))}`
  return { ...act, tone: act.tone === 'good' ? 'idle' : act.tone, title: ACT.titles.canWait, brief, text: `${act.text} ${lost}`, steps, section: 'held-node', nodes }
}

/** Whether to end or to release a held node. `adviceOn` names the action. */
function stepOf(node: HeldNode): string {
  const { verb, xid } = adviceOn(node)
  if (xid === '79') return ACT.held.xid79(node.NodeId)
  return verb === 'End instance' ? ACT.held.broken(node.NodeId) : ACT.held.unclear(node.NodeId, xid)
}

/** Return the nodes that the incidents lost. */
export const lostBy = <T extends Pick<Node, 'NodeId'>>(incidents: readonly { InstanceIds?: string[] }[], nodes: readonly T[]): T[] => {
  const lost = new Set(incidents.flatMap((each) => each.InstanceIds ?? []))
  return nodes.filter((node) => lost.has(node.NodeId))
}

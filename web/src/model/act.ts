/** Do I need to act: yes or no, what to do, and where the runbook says more. Pure; the first thing that asks for a person wins. */
import type { Node } from '../contract'
import { ago, count, duration, plural, sentence } from './format'
import { STALE_SECONDS } from './figures'
import { adviceOn, waitsForAPerson } from './nodes'
import { hasLetGo, isOver, leftUndone, type Tone } from './standing'
import type { Facts, HeldNode, PhaseNow, Statement } from './facts'

export interface Act extends Statement {
  needed: boolean
  /** What to do, in order; also where nothing is urgent. */
  steps: string[]
  /** The section of docs/runbook.md about it: what it means, what to look at, what to do. */
  section?: string
  /** Nodes that are to be looked at. */
  nodes?: { fleet?: string; ids: string[] }
}

/** A recovery that has taken this many times as long as usual is worth a look. */
export const LATE_FACTOR = 3
export const LATE_SECONDS = 300
/** A recovery is never late before this, however quick the earlier ones were. */
export const LEAST_LATE_SECONDS = 30

export interface Rest {
  moving: Statement
  protection: Statement
  recovery?: Statement & PhaseNow
  isBeforeFirstStep: boolean
  /** What AWS does not give, and when Everstep asks again; undefined: AWS gives what is asked for. */
  shortage?: string
}

const yes = (section: string, tone: Tone, text: string, steps: string[]): Act => ({ needed: true, tone, title: 'Yes', text, steps, section })
const no = (text: string, tone: Tone = 'good', section?: string): Act => ({ needed: false, tone, title: 'No', text, steps: [], section })

export function actOf(facts: Facts, rest: Rest): Act {
  const { job, fleet } = facts
  const { recovery } = rest
  const act = ofThePage(facts) ?? ofTheEnd(facts) ?? ofAPerson(job)
  if (act) return act
  if (fleet?.FleetStatus === 'frozen') {
    const steps = (fleet.Drift ?? []).map((drift) => `Put right in AWS: ${drift}`)
    const cannot = recovery ? 'This recovery may need an instance ended, and the fleet is frozen.' : 'The fleet is frozen: a lost instance would not be replaced.'
    return yes('frozen-fleet', recovery ? 'bad' : 'warn', `${cannot} ${sentence(fleet.Reason ?? '')}`.trim(), steps.length ? steps : ['See the fleet: it says what it misses, and goes on by itself once it is there.'])
  }
  if (recovery) return isLaunchSuspended(fleet) ? ofSuspendedLaunches(facts, true) : withNodes(ofARecovery(facts, recovery, rest.shortage), facts)
  const training = ofTraining(facts, rest)
  return isLaunchSuspended(fleet) && !training.needed ? ofSuspendedLaunches(facts, false) : withNodes(training, facts)
}

function ofSuspendedLaunches({ job, fleet }: Facts, isRecovering: boolean): Act {
  const steps = [`Ask who suspended it, then: aws autoscaling resume-processes --auto-scaling-group-name ${fleet?.AutoScalingGroupName ?? '…'} --scaling-processes Launch`]
  if (isRecovering) return yes('late-recovery', 'bad', 'This recovery may need an instance, and its group starts none.', steps)
  if (job.SecondaryStatus === 'Pending' || job.SecondaryStatus === 'Interrupted') return yes('pending', 'warn', 'It waits for nodes, and their group starts none.', steps)
  return yes('late-recovery', 'warn', 'The group starts no instances: a lost one would not be replaced.', steps)
}

/** A person has suspended the group's Launch process while it lacks instances. What AWS suspends itself is lifted by itself. */
export const isLaunchSuspended = (fleet: Facts['fleet']): boolean => (fleet?.Reason ?? '').includes(RESUMED_BY_A_PERSON)

/** Words of `waiting_words` (control_plane/core/capacity.py). */
export const RESUMED_BY_A_PERSON = 'resume the process to launch instances'

/** What is shown is old: nobody can say from it what the job needs. */
function ofThePage({ staleSeconds = 0, refusal }: Facts): Act | undefined {
  if (staleSeconds <= STALE_SECONDS) return undefined
  const steps = ['Check that the control plane runs: everstep server answers at /v1/health.', 'Training goes on without the control plane, but a failure now waits for it.']
  return refusal
    ? yes('no-news', 'warn', `The control plane has refused to say how this job is for ${duration(staleSeconds)}, so what is shown may be over. ${sentence(refusal)}`, ['See the control plane’s log, by the request id in the message.', steps[1]!])
    : yes('no-news', 'warn', `This page has heard nothing for ${duration(staleSeconds)}, so what it shows may be over.`, steps)
}

function ofTheEnd(facts: Facts): Act | undefined {
  const { job, protection } = facts
  if (!isOver(job)) return undefined
  if (job.TrainingJobStatus === 'Completed') return withNodes(no('The job is done.'), facts)
  if (job.TrainingJobStatus === 'Stopped') return withNodes(no('The job was stopped.', 'idle'), facts)
  const failed = yes('failed', 'bad', 'The job has failed and will not start again by itself.', [
    'Read why under “Is it moving?”, and the last lines of the failing rank under Logs.',
    `Mend the cause, then submit it again under another name; ${protection?.LastCheckpoint ? `its newest checkpoint, step ${count(protection.LastCheckpoint.Step)}, is under Checkpoints.` : 'it has no checkpoint in S3.'}`,
  ])
  return withNodes(failed, facts)
}

/** A person has taken the job into their own hands, by taking it over or by pausing it: it waits for them, whatever happens. */
function ofAPerson(job: Facts['job']): Act | undefined {
  const name = job.TrainingJobName
  if (job.TakenOverTime !== undefined) {
    const who = job.TakenOverBy ?? 'a person'
    const undone = leftUndone(job)
    const handBack = `Hand it back, and Everstep decides again: everstep jobs hand-back ${name}`
    if (undone) return yes('taken-over', 'bad', `Nobody acts for this job: ${who} has taken it over, and ${undone.replace(/\.$/, '')}.`, [`Ask ${who} whether they are at it.`, handBack])
    return { ...no(`${sentence(`${who} looks after this job`)} A failure now waits for a person: Everstep decides nothing until it is handed back.`, 'warn', 'taken-over'), steps: [handBack] }
  }
  if (job.SecondaryStatus === 'Paused') {
    return yes('paused', 'idle', 'A person paused the job, and it does not go on by itself.', [
      `To let it go on: everstep jobs resume ${name}`,
      hasLetGo(job) ? 'If the pause is meant, nothing is to be done: its state is kept in S3.' : 'If the pause is meant, nothing is to be done: it has not started yet.',
    ])
  }
  if (job.TrainingJobStatus === 'Stopping') return no('It stops by itself at the next step that all ranks agree on.', 'busy')
  return undefined
}

function ofARecovery({ job, fleet }: Facts, recovery: Statement & PhaseNow, shortage?: string): Act {
  const name = job.FleetName ?? fleet?.FleetName ?? 'FLEET'
  if (shortage !== undefined) {
    const spare = fleet?.SparePolicy === undefined ? `everstep fleets update ${name} --spare-count ${(fleet?.SpareCount ?? 0) + 1}` : `everstep fleets describe ${name}`
    return {
      ...no(shortage, 'busy', 'late-recovery'),
      steps: ['To free a node now: everstep jobs pause JOB', `To keep a spare from now on: ${spare}`],
    }
  }
  if (recovery.tone === 'warn') {
    const why = recovery.usualSeconds === undefined ? 'no earlier incident of this kind tells how long it takes' : `after this kind of failure it usually takes ${duration(recovery.usualSeconds)}`
    return yes('late-recovery', 'warn', `This phase has taken longer than ${duration(recovery.lateAfterSeconds)}: ${why}.`, [
      recovery.phase === 'replace' ? `See which nodes the fleet waits for, and why: everstep fleets describe ${name}` : `See what the ranks print: everstep jobs logs ${job.TrainingJobName}`,
      `See what Everstep has done since the failure: everstep events list --job ${job.TrainingJobName}`,
    ])
  }
  return no('Everstep is recovering the job; it needs nobody.', 'busy', recovery.cause)
}

function ofTraining({ job, progress, now }: Facts, { moving, protection, isBeforeFirstStep }: Rest): Act {
  const isTraining = job.SecondaryStatus === 'Training'
  if (moving.title === 'Standing still') {
    return yes('standing-still', 'warn', 'The ranks run but make no steps.', [
      'Look at the ranks’ logs: a long evaluation or data loading is normal for some scripts.',
      `If it hangs, stop it with: everstep jobs stop ${job.TrainingJobName}`,
    ])
  }
  if (progress?.rate && progress.usualRate && progress.rate < 0.5 * progress.usualRate && isTraining) {
    return yes('slow', 'warn', 'Training is at less than half of its usual rate.', ['Compare step times under Metrics; one slow node slows down all.'])
  }
  if (job.SecondaryStatus === 'Pending') {
    const max = job.StoppingCondition?.MaxPendingTimeInSeconds
    const limit = max && job.CreationTime ? ` It gives up ${ago(job.CreationTime + max, now)}.` : ''
    return no(`It starts by itself when it is its turn.${limit}`, 'idle', 'pending')
  }
  if (job.SecondaryStatus === 'Interrupted') {
    return no(hasLetGo(job) ? 'It goes on by itself, from S3, once it has its nodes.' : 'It gives its nodes to another job, and goes on by itself once it has nodes again.', 'idle', 'interrupted')
  }
  if (job.SecondaryStatus === 'Pausing') return no('A person paused it: all ranks stop at one step, which is kept in S3. Then it waits to be resumed.', 'busy', 'paused')
  if (protection.tone === 'bad' && isTraining && (job.Boundary ?? -1) > 3) {
    return yes('unprotected', 'warn', 'It trains, but no step is kept in memory: a failure now goes back to S3 or to the start.', ['See Protection: each shard says why it has no copies.'])
  }
  if (protection.tone === 'warn' && isTraining) {
    return no('Fewer copies than asked for; Everstep makes them again by itself. Look at Protection if this lasts.', 'warn', 'unprotected')
  }
  if (isBeforeFirstStep) return no('The first step of a launch takes longer than others.', 'busy')
  if (!isTraining) return no('It is on its way.', 'busy')
  if (protection.tone === 'idle') return no('It trains. No step is kept in memory yet: a failure now would go back to where this launch began.', 'idle')
  return no('It trains, and a failure would be recovered from.')
}

/** What this job's failures have left for a person: it keeps, but it costs, and the fleet lacks it. */
function withNodes(act: Act, { job, heldNodes = [] }: Facts): Act {
  const held = heldNodes.filter(waitsForAPerson)
  if (!held.length) return act
  const text = act.needed ? act.text : `${act.text} What can wait: ${plural(held.length, 'node')} that it lost ${held.length === 1 ? 'waits' : 'wait'} for a person.`
  const nodes = { fleet: job.FleetName, ids: held.map((node) => node.NodeId) }
  return { ...act, title: act.needed ? act.title : 'Not now', text, steps: [...act.steps, ...held.map(stepOf)], section: act.needed ? act.section : 'held-node', nodes }
}

/** What decides between ending and releasing a held node, for a person; `adviceOn` names the action. */
function stepOf(node: HeldNode): string {
  const { verb, xid } = adviceOn(node)
  if (xid === '79') return `${node.NodeId}: Xid 79 says that its GPU has fallen off the bus, which no restart mends: end the instance.`
  if (verb === 'End instance') return `${node.NodeId}: its hardware is at fault: end the instance.`
  return `${node.NodeId}: end the instance if its hardware is at fault${xid ? `, as Xid ${xid} suggests` : ''}; release it if it is well.`
}

/** Which of a fleet's nodes this job's incidents have lost. */
export const lostBy = <T extends Pick<Node, 'NodeId'>>(incidents: readonly { InstanceIds?: string[] }[], nodes: readonly T[]): T[] => {
  const lost = new Set(incidents.flatMap((each) => each.InstanceIds ?? []))
  return nodes.filter((node) => lost.has(node.NodeId))
}

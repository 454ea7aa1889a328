/**
 * Every figure that a page shows about a job, an incident, a fleet or a node. Pure.
 *
 * Pages and parts read figures from here and never from an answer of the API. An element that shows a figure spreads
 * `hook(figures, field)`, for example `<td {...hook(job, 'committedStep')}>step {shown(job, 'committedStep')}</td>`:
 *
 *     data-figure="committed-step"   the field, in kebab case
 *     data-of="job/RUN_ID"           the object
 *     data-value="198"               the value; empty if it is unknown or does not apply
 *     data-tone="good"               the tone, if the field has one
 *
 * `test/stories.test.tsx` renders every page with answers that the real control plane gave in random stories. A story
 * is a simulated fleet with random jobs and failures. The test's rules find figures only by these attributes, so words
 * and layout may change. Each value must occur in the element's text as `shown` formats it. Equal hooks must have equal
 * values on one page and across pages.
 */
import type {
  DescribeProtectionResponse,
  Duty,
  Fleet,
  Incident,
  Node,
  SimilarIncident,
  TrainingJob,
  TrainingJobSummary,
} from '../contract'
import { toneOfDuty } from '../words/duty'
import { OUTCOMES } from '../words/incident'
import { phaseWords } from './causes'
import { count, dollars, duration, percent, plural } from './format'
import { hasReleasedNodes, isOver, reachedStep, statusOf, type Tone } from './standing'

/** Age in seconds from which an answer is stale, if no request failed before. */
export const STALE_SECONDS = 15

/** Any job as the API describes or lists it. A list contains fewer fields. */
export type AnyJob = Partial<TrainingJob> & Partial<TrainingJobSummary>
type Protection = Partial<DescribeProtectionResponse>

export type JobFigures = ReturnType<typeof jobFigures>

/**
 * How memory protects a job.
 *
 * - Protected: every shard has all its copies, and all nodes are connected and healthy.
 * - Unconfirmed: the last reports said Protected, but a node is silent or reports a fault since.
 * - Not yet protected: the launch has committed no step so far.
 * - Released: the job has ended or has no nodes.
 */
export type ProtectionWord =
  'Protected' | 'Degraded' | 'Unprotected' | 'Unconfirmed' | 'Not yet protected' | 'Released' | 'Unknown'

const PROTECTION_TONES: Record<ProtectionWord, Tone> = {
  Protected: 'good',
  Degraded: 'warn',
  Unconfirmed: 'warn',
  Unprotected: 'bad',
  'Not yet protected': 'idle',
  Released: 'idle',
  Unknown: 'idle',
}

export interface Context {
  /** The job's answer of DescribeProtection. */
  protection?: Protection
  /** Whether the last answer of the server is old. A page shows no green state from such an answer. */
  isStale?: boolean
}

/** Return the figures of a job from its description or its entry in a list. */
export function jobFigures(job: AnyJob, { protection: any, isStale = false }: Context = {}) {
  const protection = ofThisLaunch(any, job)
  const live = (tone: Tone): Tone => (isStale && tone === 'good' ? 'idle' : tone)
  const hasNodes = holdsNodes(job)
  const nodes = nodesOf(job)
  const word = protectionWord(job, protection, nodes)
  const target = job.TargetStep
  const committed = hasNodes ? known(newestCommit(job, protection)) : undefined
  // All ranks have finished a committed step. The protection can be newer than the job's answer.
  const newest = (step: number) => known(step < 0 ? step : Math.max(step, committed ?? step))
  const reached = newest(reachedStep(job))
  const status = statusOf(job.SecondaryStatus)
  const isShort = job.TrainingJobStatus === 'Completed' && target !== undefined && (reached ?? 0) < target
  return {
    of: `job/${job.RunId ?? job.TrainingJobName ?? ''}`,
    isStale,
    isOver: isOver(job),
    status: status.word,
    statusTone: live(isShort ? 'warn' : status.tone),
    /** Steps that the ranks of the current launch have finished. Absent while no ranks run. */
    step: newest(job.Boundary ?? -1),
    /** The highest step of all launches. */
    reachedStep: reached,
    targetStep: target,
    /** Share of the job that is done, 0 to 1. Absent if the script declares no target. */
    doneRatio: target ? Math.min(1, (reached ?? 0) / target) : undefined,
    /** The newest step that memory holds. Absent before the first commit and after the memory is released. */
    committedStep: committed,
    /** The newest complete checkpoint in S3. Absent without one, and without an answer of DescribeProtection. */
    checkpointStep: protection?.LastCheckpoint?.Step,
    protection: word,
    protectionTone: live(word === 'Protected' && !survivesNodeLoss(job, protection) ? 'warn' : PROTECTION_TONES[word]),
    /** Nodes that are connected and report no fault. Absent while the job has no nodes. */
    healthyNodes: hasNodes ? nodes.healthy : undefined,
    healthyNodesTone: live(nodes.isWhole ? 'good' : 'warn'),
    /** Number of nodes that the job requests, or that it has if it has more. */
    wantedNodes: nodes.wanted,
    incidents: job.IncidentCount,
    openIncidents: job.OpenIncidentCount,
    /** Steps that training repeated after failures, over all incidents. Absent in lists. */
    recomputedSteps: job.Reliability?.LostSteps,
    /** Steps that no checkpoint has. Only for a failed or stopped job, with an answer of DescribeProtection. */
    unsavedSteps: unsavedSteps(job, protection),
    ettrRatio: job.EttrRatio ?? job.Reliability?.EttrRatio,
    costUsd: job.CostUsd,
  }
}

/** Return the steps after the newest checkpoint of a job that failed or was stopped. */
function unsavedSteps(job: AnyJob, protection?: Protection): number | undefined {
  const hasLost = job.TrainingJobStatus === 'Failed' || job.TrainingJobStatus === 'Stopped'
  if (!hasLost || protection === undefined) return undefined
  return Math.max(0, reachedStep(job) - (protection.LastCheckpoint?.Step ?? job.InitialCheckpoint?.Step ?? 0))
}

/** Return the answer, or undefined if it is older than the newest launch and thus does not describe this launch. */
const ofThisLaunch = (protection: Protection | undefined, job: AnyJob): Protection | undefined =>
  (protection?.Generation ?? 0) < (job.Generation ?? 0) && protection?.Generation !== undefined ? undefined : protection

/** Whether the job was launched and still has its nodes. Only such a job has steps in memory. */
export const holdsNodes = (job: AnyJob): boolean => !hasReleased(job) && (job.Generation ?? 1) > 0

/**
 * Whether no node has steps of the job in memory.
 *
 * A list contains no SecondaryStatusTransitions. An interrupted or stopping job in a list has no such node if it has no
 * ProtectionState.
 */
function hasReleased(job: AnyJob): boolean {
  if (isOver(job) || hasReleasedNodes(job)) return true
  const isListed = job.SecondaryStatusTransitions === undefined && job.IncidentCount !== undefined
  const canWait = job.SecondaryStatus === 'Interrupted' || job.SecondaryStatus === 'Stopping'
  return isListed && canWait && job.TrainingStartTime !== undefined && job.ProtectionState === undefined
}

const known = (step: number | undefined): number | undefined => (step === undefined || step < 0 ? undefined : step)

/**
 * Return the newest committed step in a job's description and its protection, which the server sent at two times.
 *
 * If the protection is about a newer launch, the step in the description is ignored.
 */
function newestCommit(job: AnyJob, protection?: Protection): number | undefined {
  if (protection?.CommittedStep === undefined) return job.CommittedStep
  const isNewer = (protection.Generation ?? 0) > (job.Generation ?? 0)
  return isNewer ? protection.CommittedStep : Math.max(job.CommittedStep ?? -1, protection.CommittedStep)
}

/** `isWhole`: as many nodes are connected without a fault as the launch has, and as many as are assigned to the job. */
function nodesOf(job: AnyJob): { healthy?: number; wanted: number; isWhole: boolean } {
  const launched = job.GenerationNodeCount ?? job.NodeCount ?? 0
  const assigned = job.AssignedNodeCount ?? 0
  const healthy = job.HealthyNodeCount
  const wanted = Math.max(job.NodeCount ?? 0, launched, assigned, healthy ?? 0)
  return { healthy, wanted, isWhole: healthy !== undefined && healthy >= launched && healthy >= assigned }
}

function protectionWord(job: AnyJob, protection: Protection | undefined, nodes: { isWhole: boolean }): ProtectionWord {
  if (hasReleased(job)) return 'Released'
  const state = protection?.ProtectionState ?? job.ProtectionState
  if (state === undefined) return holdsNodes(job) ? 'Unknown' : 'Not yet protected'
  if (state === 'Protected') return nodes.isWhole ? 'Protected' : 'Unconfirmed'
  if (state === 'Unprotected' && isBeforeFirstCommit(job, protection)) return 'Not yet protected'
  return state
}

/** Whether no step is committed, and the job has made no more steps than the first commit takes. */
function isBeforeFirstCommit(job: AnyJob, protection?: Protection): boolean {
  return (newestCommit(job, protection) ?? -1) < 0 && reachedStep(job) <= FIRST_COMMIT_STEPS
}
const FIRST_COMMIT_STEPS = 3

/** Whether the job's steps survive the loss of one node. With one copy of each shard they do not, even if complete. */
function survivesNodeLoss(job: AnyJob, protection?: Protection): boolean {
  const odds = protection?.RecoveryOdds?.find((each) => each.LostNodes === 1)
  return odds === undefined ? (job.SurvivesNodeLoss ?? true) : odds.Probability >= 1
}

export type Phase = 'unaccounted' | 'detect' | 'replace' | 'restore' | 'rework'
export interface PhaseLength {
  phase: Phase
  seconds: number
  isOpen: boolean
}

export type IncidentFigures = ReturnType<typeof incidentFigures>

/**
 * Return the figures of an incident.
 *
 * `job` and `protection`: of the incident's job. Without them, `unsavedSteps` is absent.
 */
export function incidentFigures(
  incident: Incident,
  now: number,
  job?: AnyJob,
  { protection, isStale = false }: Context = {},
) {
  const outcome = OUTCOMES[incident.Outcome]
  const isOpen = incident.ClosedAt === undefined
  const phases = phaseLengths(incident, now)
  const hasEndedJob = incident.Outcome === 'JobFailed' || incident.Outcome === 'JobStopped'
  const unsaved = hasEndedJob && job?.RunId === incident.RunId ? unsavedSteps(job, protection) : undefined
  return {
    of: `incident/${incident.IncidentId}`,
    isOpen,
    /** The present phase of an open incident, or how a closed one ended. */
    phase: isOpen ? phaseWords(incident.Phase, incident) : outcome.word,
    phaseTone: isOpen ? ('busy' as const) : isStale && outcome.tone === 'good' ? ('idle' as const) : outcome.tone,
    /** Phases that have begun, in their order. Their sum is `totalSeconds`. */
    phases,
    totalSeconds: phases.reduce((total, each) => total + each.seconds, 0),
    reachedStep: incident.ReachedStep,
    /** The step from which the next launch resumed. Absent until it is chosen. */
    resumedStep: incident.FromStep,
    /** Steps that training repeats after the failure. Absent until the control plane has chosen a step. */
    recomputedSteps: incident.LostSteps,
    /** Steps that no checkpoint keeps. Only for an incident with which the job failed or was stopped. */
    unsavedSteps: unsaved,
    /** The newest step that a checkpoint keeps; 0 without a checkpoint. Absent without `unsavedSteps`. */
    keptStep: unsaved === undefined ? undefined : reachedStep(job!) - unsaved,
    costUsd: incident.CostUsd,
  }
}

/** Return the figures of an incident that ListSimilarIncidents lists. */
export const similarFigures = (incident: SimilarIncident): { of: string; recomputedSteps?: number } => ({
  of: `incident/${incident.IncidentId}`,
  recomputedSteps: incident.LostSteps,
})

const PHASES: readonly Phase[] = ['unaccounted', 'detect', 'replace', 'restore', 'rework']

/**
 * Return the length of each phase of an incident until `now`, in seconds.
 *
 * A phase that has not begun is absent, and so is a phase of a closed incident that took no time. The time before the
 * detection without a control plane is a phase of its own.
 */
export function phaseLengths(incident: Incident, now: number): PhaseLength[] {
  const open = incident.ClosedAt === undefined ? Math.max(0, PHASES.indexOf(incident.Phase as Phase)) : undefined
  const detect = incident.DetectSeconds ?? Math.max(0, incident.OpenedAt - incident.FailedAt)
  const absent = Math.min(detect, incident.ControlPlaneAbsentSeconds ?? 0)
  const seconds = [absent, detect - absent, incident.ReplaceSeconds, incident.RestoreSeconds, incident.ReworkSeconds]
  const lengths: PhaseLength[] = []
  let spent = 0
  for (const [index, phase] of PHASES.entries()) {
    if (open !== undefined && index > open) break
    const isOpen = index === open
    const length = isOpen ? Math.max(0, now - incident.FailedAt - spent) : (seconds[index] ?? 0)
    if (isOpen || length > 0 || (open !== undefined && phase !== 'unaccounted'))
      lengths.push({ phase, seconds: length, isOpen })
    spent += length
  }
  return lengths
}

/** Return the lengths of an incident's phases as texts that add up to the text of their total. */
export function phaseTexts(phases: readonly PhaseLength[]): string[] {
  const total = phases.reduce((sum, { seconds }) => sum + seconds, 0)
  const [, unit, name] = UNITS.find(([below]) => total < below)!
  const parts = phases.map(({ seconds }) => Math.floor(seconds / unit))
  // The parts with the largest remainders are rounded up.
  const missing = Math.round(total / unit) - parts.reduce((sum, part) => sum + part, 0)
  const remainder = (index: number) => phases[index]!.seconds / unit - parts[index]!
  const order = [...phases.keys()].sort((a, b) => remainder(b) - remainder(a))
  const raised = new Set(order.slice(0, Math.max(0, missing)))
  const text = (seconds: number) => (unit >= 1 && seconds < 60 ? `${seconds} s` : duration(seconds))
  return parts.map((part, index) => {
    const units = part + Number(raised.has(index))
    return units === 0 && phases[index]!.seconds > 0 ? `< ${name}` : text(units * unit)
  })
}
/** The seconds below which a duration is shown in a unit, the unit in seconds, and its name, as in `duration`. */
const UNITS: readonly (readonly [below: number, unit: number, name: string])[] = [
  [9.95, 0.1, '0.1 s'],
  [3600, 1, '1 s'],
  [172_800, 60, '1 min'],
  [Infinity, 3600, '1 h'],
]

export type FleetFigures = ReturnType<typeof fleetFigures>

/** Return the figures of a fleet. An active fleet that lacks nodes waits for instances, and is not green. */
export function fleetFigures(fleet: Fleet, { isStale = false }: Context = {}) {
  const missing = Math.max(0, fleet.DesiredNodeCount - fleet.ConnectedNodeCount)
  const waits = fleet.FleetStatus === 'active' && missing > 0
  const tone: Tone = fleet.FleetStatus !== 'active' ? 'warn' : waits ? 'busy' : 'good'
  return {
    of: `fleet/${fleet.FleetName}`,
    isStale,
    status: waits ? `waits for ${plural(missing, 'instance')}` : fleet.FleetStatus,
    statusTone: tone === 'good' && isStale ? ('idle' as const) : tone,
    nodes: fleet.NodeCount,
    connectedNodes: fleet.ConnectedNodeCount,
    desiredNodes: fleet.DesiredNodeCount,
    missingNodes: missing,
    incidents: fleet.IncidentCount,
    lostNodes: fleet.LostNodeCount,
    ettrRatio: fleet.Reliability?.EttrRatio,
    mttrSeconds: fleet.Reliability?.MttrSeconds,
    costUsd: fleet.CostUsd,
    priceUsdPerHour: fleet.PriceUsdPerHour === undefined ? undefined : fleet.PriceUsdPerHour * fleet.NodeCount,
  }
}

export type NodeFigures = ReturnType<typeof nodeFigures>

const NODE_TONES: Record<Node['NodeStatus'], Tone> = {
  joining: 'busy',
  spare: 'idle',
  assigned: 'good',
  held: 'warn',
  rebooting: 'busy',
  draining: 'warn',
  gone: 'idle',
}

/** Return the figures of a node. An assigned node is green only while its agent is connected and reports no problem. */
export function nodeFigures(node: Node, { isStale = false }: Context = {}) {
  const live = (tone: Tone): Tone => (isStale && tone === 'good' ? 'idle' : tone)
  const isWell = node.Connected && !(node.Conditions ?? []).length
  const tone = NODE_TONES[node.NodeStatus] ?? 'idle'
  return {
    of: `node/${node.NodeId}`,
    status: node.NodeStatus,
    statusTone: live(tone === 'good' && !isWell ? 'warn' : tone),
    /** Absent for an ended node. */
    agent: node.NodeStatus === 'gone' ? undefined : node.Connected ? 'connected' : 'not connected',
    agentTone: live(node.Connected ? 'good' : 'warn'),
  }
}

/** Return the attributes of the element that shows the length of one phase of an incident. */
export const phaseHook = ({ IncidentId }: Pick<Incident, 'IncidentId'>, phase: Phase, seconds: number) => ({
  'data-figure': `${phase}-seconds`,
  'data-of': `incident/${IncidentId}`,
  'data-value': String(seconds),
})

/** Return the attributes of the element that shows a statement of the verdict: `moving`, `safe` or `act`. */
export const statementHook = (figures: JobFigures, name: string, { tone, title }: { tone: Tone; title: string }) => ({
  'data-figure': name,
  'data-of': figures.of,
  'data-value': title,
  'data-tone': tone,
})

/** Return the attributes of the element that shows the sentence of a job's or fleet's duty. */
export const dutyHook = ({ of, isStale }: { of: string; isStale: boolean }, duty: Duty) => ({
  'data-figure': 'duty',
  'data-of': of,
  'data-value': duty.Sentence,
  'data-tone': isStale && toneOfDuty(duty) === 'good' ? 'idle' : toneOfDuty(duty),
})

export type AnyFigures = JobFigures | IncidentFigures | FleetFigures | NodeFigures | ReturnType<typeof similarFigures>
/** Names of the fields with a single number or word. Only such fields can be shown as a figure. */
export type Field<F extends AnyFigures> = {
  [K in keyof F & string]: K extends 'of' | `${string}Tone`
    ? never
    : NonNullable<F[K]> extends string | number
      ? K
      : never
}[keyof F & string]

/** Return the attributes of the element that shows a figure. */
export function hook<F extends AnyFigures>(figures: F, field: Field<F>): Record<`data-${string}`, string> {
  const all = figures as unknown as Record<string, unknown>
  const tone = all[`${field}Tone`]
  return {
    'data-figure': field.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`),
    'data-of': figures.of,
    'data-value': String(all[field] ?? ''),
    ...(typeof tone === 'string' ? { 'data-tone': tone } : {}),
  }
}

/** Return a figure as text: numbers by the kind of their field, `–` for an absent value. */
export function shown<F extends AnyFigures>(figures: F, field: Field<F>): string {
  return formatted(field, (figures as unknown as Record<string, unknown>)[field] as string | number | undefined)
}

/** Return the text of a value by the kind of its field. */
export function formatted(field: string, value: string | number | undefined): string {
  if (value === undefined) return '–'
  if (typeof value === 'string') return value
  if (/seconds$/i.test(field)) return duration(value)
  if (/ratio$/i.test(field)) return percent(value)
  if (/usd/i.test(field)) return dollars(value)
  return count(value)
}

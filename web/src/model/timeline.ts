/** The timeline of a job as spans on lanes: what the job did, and its nodes. Pure. */
import type { Incident, TimeSpan, TrainingJob, TrainingJobNode } from '../contract'
import { TIMELINE } from '../words/jobTabs'
import { causeTitle } from './causes'
import { ELAPSED, roundTicks } from './chart'
import { sentence } from './format'
import { wordsOf } from './time'

export interface Span {
  /** Unix seconds. */
  from: number
  to: number
  /** An accounting bucket, or "node". */
  kind: string
  /** The word inside the bar. Empty for nodes. */
  word: string
  /** The tooltip. */
  label: string
  incidentId?: string
}

export interface Fault {
  at: number
  label: string
  incidentId: string
}

export interface Lane {
  id: string
  label: string
  spans: Span[]
  faults: Fault[]
}

/** Maximum number of node lanes that are drawn by default. */
export const MOST_NODES = 64

/**
 * Compute the spans and lanes of a job's timeline, and the number of nodes without a lane.
 *
 * Lanes: the spans of the job's accounting, then at most `maxNodes` nodes. Nodes with faults come first, then current
 * nodes. A node's span ends when the node left the job. If the job lost the node, the span ends at the failure.
 */
export function timeline(
  job: Partial<TrainingJob>,
  incidents: Incident[],
  timeSpans: readonly TimeSpan[],
  nodeSpans: readonly TrainingJobNode[],
  now: number,
  maxNodes = MOST_NODES,
) {
  const from = job.CreationTime ?? now - 60
  const to = Math.max(from + 1, job.TrainingEndTime ?? now)
  const within = (at: number) => Math.min(to, Math.max(from, at))
  const isOpen = incidents.some((each) => each.ClosedAt === undefined)
  const counted = isOpen ? to : Math.min(to, job.AccountedUntil ?? to)
  const unplaced = incidents.filter((each) => !(each.FaultedInstanceIds ?? []).length)
  const lanes: Lane[] = [
    {
      id: 'job',
      label: TIMELINE.job,
      spans: timeSpans.map((each) => spanOf(each, incidents, counted, within)),
      faults: unplaced.map((each) => faultOf(each)),
    },
  ]
  const faulted = grouped(incidents.flatMap((each) => (each.FaultedInstanceIds ?? []).map((id) => [id, each] as const)))
  const worked = grouped(nodeSpans.map((span) => [span.NodeId, span] as const))
  const isCurrent = (id: string) => Number(worked.get(id)?.some((span) => span.EndTime === undefined) ?? false)
  const ids = [...new Set([...faulted.keys(), ...[...worked.keys()].sort((a, b) => isCurrent(b) - isCurrent(a))])]
  for (const id of ids.slice(0, maxNodes)) {
    const hits = faulted.get(id) ?? []
    const spans = worked.get(id) ?? []
    const losses = hits.filter((each) => each.InstanceIds?.includes(id)).map((each) => each.FailedAt)
    lanes.push({
      id,
      label: id,
      spans: spans.map((span) => workSpan(span, losses, to, within)),
      faults: hits.map((each) => ({ ...faultOf(each, id), at: faultAt(each, spans) })),
    })
  }
  return { from, to, lanes, hiddenCount: Math.max(0, ids.length - maxNodes) }
}

function grouped<T>(pairs: readonly (readonly [string, T])[]): Map<string, T[]> {
  const groups = new Map<string, T[]>()
  for (const [key, value] of pairs) groups.set(key, [...(groups.get(key) ?? []), value])
  return groups
}

/**
 * Return the bar of a span of the job's accounting. A span within an incident leads to the incident's page.
 *
 * `counted`: end of the last span. Outside of incidents, it is when the control plane last counted (`model/time.ts`).
 */
function spanOf(span: TimeSpan, incidents: Incident[], counted: number, within: (at: number) => number): Span {
  const end = span.EndTime ?? counted
  const cause = incidents.find((each) => each.FailedAt <= span.StartTime && end <= (each.ClosedAt ?? counted))
  const { label, what } = wordsOf(span.Bucket)
  return {
    from: within(span.StartTime),
    to: within(end),
    kind: span.Bucket,
    word: label,
    label: [label, what].filter(Boolean).join(': '),
    incidentId: cause?.IncidentId,
  }
}

/** Return the span in which a node worked. A lost node's span ends at the failure, its record at the next launch. */
function workSpan(span: TrainingJobNode, losses: readonly number[], end: number, within: (at: number) => number): Span {
  const last = span.EndTime ?? end
  const failed = losses.filter((at) => at > span.StartTime && at < last)
  return {
    from: within(span.StartTime),
    to: within(Math.min(last, ...failed)),
    kind: 'node',
    word: '',
    label: TIMELINE.works(span.NodeId),
  }
}

/**
 * Return the time at which a fault is marked on a node's lane.
 *
 * The time is that of the failure. If the node joined the job during the recovery, it is the time when it joined.
 */
function faultAt({ FailedAt, ClosedAt }: Incident, spans: readonly TrainingJobNode[]): number {
  if (spans.some((span) => span.StartTime <= FailedAt && FailedAt <= (span.EndTime ?? Infinity))) return FailedAt
  const later = spans.find((span) => span.StartTime > FailedAt && span.StartTime <= (ClosedAt ?? Infinity))
  return later?.StartTime ?? FailedAt
}

/** Return a fault with its evidence. On the lane of `node`, only evidence about this node is shown if any exists. */
function faultOf(incident: Incident, node?: string): Fault {
  const evidence = incident.Evidence ?? []
  const own = evidence.filter((_, index) => incident.EvidenceFacts?.[index]?.NodeIds.some((id) => id === node))
  const facts = (own.length ? own : evidence).map(sentence).join(' ')
  const label = `${causeTitle(incident.Cause)}. ${facts}`.trim()
  return { at: incident.FailedAt, label, incidentId: incident.IncidentId }
}

const DAY = 86_400
/** Possible distances of ticks on the time axis, in seconds. */
const STEPS = [...ELAPSED, 30 * DAY, 90 * DAY]

/** Return at most `most` + 1 moments at round times of the clock. */
export const ticks = (from: number, to: number, most: number): number[] =>
  roundTicks(from, to, most, { steps: STEPS, beyond: 365 * DAY })

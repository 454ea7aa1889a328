/** The recovery timeline as marks on lanes: one lane for the job's states, one for each node, and the incidents over them. Pure. */
import type { Incident, TrainingJob, TrainingJobNode } from '../contract'
import { phaseLengths } from './figures'

export interface Span {
  from: number
  to: number
  kind: string
  label: string
  incidentId?: string
}

export interface Lane {
  id: string
  label: string
  spans: Span[]
  /** Moments at which something failed here. */
  faults: { at: number; label: string; incidentId: string }[]
}

export interface Timeline {
  from: number
  to: number
  lanes: Lane[]
  /** Nodes that have no lane, because there are too many. */
  hiddenCount: number
}

/** Lanes are drawn for so many nodes unless more are asked for. */
export const MOST_NODES = 64

/** Lay out a job's life. Lanes: the job first, then nodes, those where something failed before others, at most `maxNodes`. */
export function timeline(job: Partial<TrainingJob>, incidents: Incident[], spans: readonly TrainingJobNode[], now: number, maxNodes = MOST_NODES): Timeline {
  const from = job.CreationTime ?? now - 60
  const to = Math.max(from + 1, job.TrainingEndTime ?? now)
  const within = (at: number) => Math.min(to, Math.max(from, at))
  const states: Span[] = (job.SecondaryStatusTransitions ?? []).map((each) => ({
    from: within(each.StartTime),
    to: within(each.EndTime ?? to),
    kind: each.Status.toLowerCase(),
    label: `${each.Status}: ${each.StatusMessage}`,
  }))
  /** A lost node works until its failure, also while the API still counts it to the job. */
  const works = (faults: Incident[]) => (span: TrainingJobNode): Span => {
    const end = span.EndTime ?? to
    const failed = faults.map((each) => each.FailedAt).filter((at) => at > span.StartTime && at < end)
    const label = `${span.NodeId} works for this job`
    return { from: within(span.StartTime), to: within(Math.min(end, ...failed)), kind: 'node', label }
  }
  const recoveries: Span[] = []
  for (const incident of incidents) {
    let at = incident.FailedAt
    for (const { phase, seconds } of phaseLengths(incident, now)) {
      recoveries.push({ from: within(at), to: within(at + seconds), kind: phase, label: `${phase}, incident ${incident.IncidentId}`, incidentId: incident.IncidentId })
      at += seconds
    }
  }
  const lanes: Lane[] = [
    { id: 'job', label: 'job', spans: states, faults: [] },
    { id: 'recovery', label: 'recovery', spans: recoveries, faults: incidents.filter((each) => !(each.FaultedInstanceIds ?? []).length).map((each) => fault(each)) },
  ]
  const hit = new Map<string, Incident[]>()
  for (const incident of incidents) {
    for (const id of incident.FaultedInstanceIds ?? []) hit.set(id, [...(hit.get(id) ?? []), incident])
  }
  const worked = new Map<string, TrainingJobNode[]>()
  for (const span of spans) worked.set(span.NodeId, [...(worked.get(span.NodeId) ?? []), span])
  const isThere = (id: string) => Number(worked.get(id)?.some((span) => span.EndTime === undefined) ?? false)
  const nodes = [...new Set([...hit.keys(), ...[...worked.keys()].sort((a, b) => isThere(b) - isThere(a))])]
  for (const id of nodes.slice(0, maxNodes)) {
    const faults = hit.get(id) ?? []
    lanes.push({ id, label: id, spans: (worked.get(id) ?? []).map(works(faults.filter((each) => each.InstanceIds?.includes(id)))), faults: faults.map((each) => ({ ...fault(each, id), at: faultAt(each, worked.get(id) ?? []) })) })
  }
  return { from, to, lanes, hiddenCount: Math.max(0, nodes.length - maxNodes) }
}

/** When an incident is marked on a node's lane: when it failed; for who came only during the recovery and failed then, when it came. */
function faultAt({ FailedAt, ClosedAt }: Incident, spans: readonly TrainingJobNode[]): number {
  if (spans.some((span) => span.StartTime <= FailedAt && FailedAt <= (span.EndTime ?? Infinity))) return FailedAt
  return spans.find((span) => span.StartTime > FailedAt && span.StartTime <= (ClosedAt ?? Infinity))?.StartTime ?? FailedAt
}

/** On a node's lane: with what speaks of that node, where anything does. */
function fault(incident: Incident, node?: string): Lane['faults'][number] {
  const evidence = incident.Evidence ?? []
  const own = node === undefined ? [] : evidence.filter((each) => each.includes(node))
  return { at: incident.FailedAt, label: `${incident.Cause}: ${(own.length ? own : evidence).join(' ')}`, incidentId: incident.IncidentId }
}

/** Round moments for an axis: at most `most` of them, steps of 1, 2, 5, 10, 15, 30 seconds, minutes, hours or days. */
export function ticks(from: number, to: number, most: number): number[] {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800, 2592000, 7776000]
  const step = steps.find((each) => (to - from) / each <= most) ?? 31536000
  const found: number[] = []
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at)
  return found
}

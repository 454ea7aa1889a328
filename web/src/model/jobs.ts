/** Which jobs a list shows, and in which order. Pure. */
import type { TrainingJobSummary } from '../contract'
import { urgency } from './standing'

export type Named = Pick<TrainingJobSummary, 'TrainingJobName'> & Partial<Pick<TrainingJobSummary, 'RunId'>>

/** Return a function to a job's address: its name, or its RunId if jobs of several projects have the name. */
export function addressesOf(jobs: readonly TrainingJobSummary[]): (job: Named) => string {
  const seen = new Set<string>()
  const ambiguous = new Set<string>()
  for (const { TrainingJobName } of jobs) (seen.has(TrainingJobName) ? ambiguous : seen).add(TrainingJobName)
  return (job) => (job.RunId !== undefined && ambiguous.has(job.TrainingJobName) ? job.RunId : job.TrainingJobName)
}

export type Order = 'created' | 'name' | 'status' | 'step' | 'left' | 'fleet' | 'ettr' | 'cost' | 'nodes'

const COMPARE: Record<Order, (a: TrainingJobSummary, b: TrainingJobSummary) => number> = {
  created: (a, b) => b.CreationTime - a.CreationTime,
  name: (a, b) => a.TrainingJobName.localeCompare(b.TrainingJobName),
  status: (a, b) => urgency(a.SecondaryStatus) - urgency(b.SecondaryStatus),
  step: (a, b) => b.Boundary - a.Boundary,
  left: (a, b) => (a.EstimatedRemainingSeconds ?? Infinity) - (b.EstimatedRemainingSeconds ?? Infinity) || 0,
  fleet: (a, b) => a.FleetName.localeCompare(b.FleetName),
  ettr: (a, b) => (a.EttrRatio ?? 2) - (b.EttrRatio ?? 2), // the worst first; those without one last
  cost: (a, b) => (b.CostUsd ?? -1) - (a.CostUsd ?? -1),
  nodes: (a, b) => b.NodeCount - a.NodeCount,
}

export function arranged(jobs: readonly TrainingJobSummary[], by: { text: string; status: string; fleet: string; order: Order; isReversed: boolean }): TrainingJobSummary[] {
  const wanted = by.text.toLowerCase()
  const compare = COMPARE[by.order] ?? COMPARE.created
  const sign = by.isReversed ? -1 : 1
  return jobs
    .filter((job) => (!by.status || job.SecondaryStatus === by.status) && (!by.fleet || job.FleetName === by.fleet))
    .filter((job) => !wanted || `${job.TrainingJobName} ${job.Reason}`.toLowerCase().includes(wanted))
    .toSorted((a, b) => sign * (compare(a, b) || COMPARE.created(a, b)))
}

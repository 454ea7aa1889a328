/** The jobs that wait for nodes, and what would start them. Pure. */
import type { Fleet, TrainingJob, TrainingJobSummary } from '../contract'
import { QUEUE } from '../words/queue'
import { isQueued } from './standing'

const WITHOUT_NODES = new Set(['Pending', 'Paused'])

/**
 * Return the jobs that may wait for nodes, higher priority first, then the oldest.
 *
 * The result contains all interrupted jobs, because only the description of such a job shows whether it waits.
 */
export const queueOf = (jobs: readonly TrainingJobSummary[]): TrainingJobSummary[] =>
  jobs
    .filter((job) => job.SecondaryStatus === 'Pending' || job.SecondaryStatus === 'Interrupted')
    .toSorted((a, b) => b.Priority - a.Priority || a.CreationTime - b.CreationTime)

/** Return the waiting jobs among descriptions, in the order in which the control plane serves them. */
export const waiting = (described: readonly TrainingJob[]): TrainingJob[] =>
  described.filter(isQueued).toSorted((a, b) => (a.QueuePosition ?? Infinity) - (b.QueuePosition ?? Infinity))

type Waiting = Pick<TrainingJob, 'NodeCount' | 'Priority' | 'FleetName' | 'RunId' | 'QueuedBehind'>
type Limits = Pick<Fleet, 'MaxNodeCount' | 'FleetStatus' | 'AutoScalingGroupName'>

/**
 * Return what would start a waiting job, one sentence each, the most likely first. All follow from the fleet's state.
 *
 * `queued`: RunIds of all waiting jobs.
 */
export function waysOutOfQueue(
  job: Waiting,
  jobs: readonly TrainingJobSummary[],
  fleet?: Limits,
  queued: ReadonlySet<string> = new Set(),
): string[] {
  const words = QUEUE.ways
  const ways: string[] = []
  const limit = fleet?.MaxNodeCount
  if (fleet && limit !== undefined && job.NodeCount > limit) {
    return [words.tooLarge(fleet.AutoScalingGroupName, limit, job.NodeCount)]
  }
  if (fleet?.FleetStatus === 'frozen') ways.push(words.frozen)
  const ahead = job.QueuedBehind ?? []
  if (ahead.length) ways.push(words.ahead(ahead))
  const holders = holdersOf(job, jobs, queued)
  const enough: TrainingJobSummary[] = []
  for (const holder of holders) {
    if (nodesOf(enough) >= job.NodeCount) break
    enough.push(holder)
  }
  if (enough.length) {
    ways.push(words.holders(enough.map((each) => words.holder(each.TrainingJobName, each.NodeCount)).join(', ')))
  }
  const used = nodesOf(holders)
  if (fleet && limit !== undefined && limit - used < job.NodeCount) {
    ways.push(words.larger(fleet.AutoScalingGroupName, limit, used))
  }
  if (holders.some((each) => each.Priority < job.Priority)) ways.push(words.preemption)
  return ways
}

const nodesOf = (jobs: readonly TrainingJobSummary[]): number => jobs.reduce((sum, job) => sum + job.NodeCount, 0)

/** Return the jobs of the fleet that have nodes: the lowest priority first, then the largest. */
function holdersOf(job: Waiting, jobs: readonly TrainingJobSummary[], queued: ReadonlySet<string>) {
  return jobs
    .filter((each) => each.FleetName === job.FleetName && each.RunId !== job.RunId)
    .filter((each) => each.TrainingEndTime === undefined && !WITHOUT_NODES.has(each.SecondaryStatus))
    .filter((each) => !queued.has(each.RunId))
    .toSorted((a, b) => a.Priority - b.Priority || b.NodeCount - a.NodeCount)
}

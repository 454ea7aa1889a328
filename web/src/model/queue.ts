/** Who waits for nodes, and what would give them to it. Pure. */
import type { Fleet, TrainingJob, TrainingJobSummary } from '../contract'
import { count, plural } from './format'
import { isQueued } from './standing'

const NO_NODES = new Set(['Pending', 'Paused'])

/** Jobs that may wait for nodes, of a higher priority first, then the oldest: of an interrupted one only its description says whether it does. */
export const queueOf = (jobs: readonly TrainingJobSummary[]): TrainingJobSummary[] =>
  jobs.filter((job) => job.SecondaryStatus === 'Pending' || job.SecondaryStatus === 'Interrupted').toSorted((a, b) => b.Priority - a.Priority || a.CreationTime - b.CreationTime)

/** Of the descriptions of those, the ones that wait, in the order in which the control plane serves them. */
export const waiting = (described: readonly TrainingJob[]): TrainingJob[] =>
  described.filter(isQueued).toSorted((a, b) => (a.QueuePosition ?? Infinity) - (b.QueuePosition ?? Infinity))

/** Ways out of the queue, the most likely first; each is a fact of the fleet as it is now, none is promised. `queued`: the runs that wait, too. */
export function freedBy(
  job: Pick<TrainingJob, 'NodeCount' | 'Priority' | 'FleetName' | 'RunId' | 'QueuedBehind'>,
  jobs: readonly TrainingJobSummary[],
  fleet?: Pick<Fleet, 'MaxNodeCount' | 'FleetStatus' | 'AutoScalingGroupName'>,
  queued: ReadonlySet<string> = new Set(),
): string[] {
  const ways: string[] = []
  const most = fleet?.MaxNodeCount
  if (fleet && most !== undefined && job.NodeCount > most) return [`Only a larger group: ${fleet.AutoScalingGroupName} may have at most ${plural(most, 'node')}, and the job needs ${count(job.NodeCount)}.`]
  if (fleet?.FleetStatus === 'frozen') ways.push('The fleet’s being put right: it is frozen.')
  const ahead = job.QueuedBehind ?? []
  if (ahead.length) ways.push(`The start of ${ahead.length === 1 ? ahead[0] : `the ${count(ahead.length)} jobs`} ahead of it.`)
  const holders = jobs
    .filter((each) => each.FleetName === job.FleetName && each.RunId !== job.RunId && each.TrainingEndTime === undefined && !queued.has(each.RunId) && !NO_NODES.has(each.SecondaryStatus))
    .toSorted((a, b) => a.Priority - b.Priority || b.NodeCount - a.NodeCount)
  const enough: TrainingJobSummary[] = []
  for (const each of holders) {
    if (enough.reduce((sum, one) => sum + one.NodeCount, 0) >= job.NodeCount) break
    enough.push(each)
  }
  if (enough.length) ways.push(`The end of ${enough.map((each) => `${each.TrainingJobName} (${plural(each.NodeCount, 'node')})`).join(', ')}, or of others that hold as many.`)
  const used = holders.reduce((sum, each) => sum + each.NodeCount, 0)
  if (fleet && most !== undefined && most - used < job.NodeCount) ways.push(`A larger group: ${fleet.AutoScalingGroupName} may have at most ${plural(most, 'node')}, and jobs hold ${count(used)} of them.`)
  const higher = holders.some((each) => each.Priority < job.Priority)
  if (higher) ways.push('Jobs of lower priority that were submitted as Preemptible give way by themselves.')
  return ways
}

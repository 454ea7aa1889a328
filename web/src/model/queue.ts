/** Who waits for nodes, and what would give them to it. Pure. */
import type { Fleet, TrainingJob, TrainingJobSummary } from '../contract'
import { count, plural } from './format'

/** Jobs without nodes that are to have some, of a higher priority first, then the oldest. */
export const queueOf = (jobs: readonly TrainingJobSummary[]): TrainingJobSummary[] =>
  jobs.filter((job) => job.SecondaryStatus === 'Pending').toSorted((a, b) => b.Priority - a.Priority || a.CreationTime - b.CreationTime)

/** Ways out of the queue, the most likely first; each is a fact of the fleet as it is now, none is promised. */
export function freedBy(job: Pick<TrainingJob, 'NodeCount' | 'Priority' | 'FleetName' | 'RunId' | 'QueuedBehind'>, jobs: readonly TrainingJobSummary[], fleet?: Pick<Fleet, 'MaxNodeCount' | 'FleetStatus' | 'AutoScalingGroupName'>): string[] {
  const ways: string[] = []
  const most = fleet?.MaxNodeCount
  if (fleet && most !== undefined && job.NodeCount > most) return [`Only a larger group: ${fleet.AutoScalingGroupName} may have at most ${plural(most, 'node')}, and the job needs ${count(job.NodeCount)}.`]
  if (fleet?.FleetStatus === 'frozen') ways.push('The fleet’s being put right: it is frozen.')
  const ahead = job.QueuedBehind ?? []
  if (ahead.length) ways.push(`The start of ${ahead.length === 1 ? ahead[0] : `the ${count(ahead.length)} jobs`} ahead of it.`)
  const holders = jobs
    .filter((each) => each.FleetName === job.FleetName && each.RunId !== job.RunId && each.TrainingEndTime === undefined && each.TrainingStartTime !== undefined && each.SecondaryStatus !== 'Pending')
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

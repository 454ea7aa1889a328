/** What a person should look at first, from the lists of jobs, fleets and nodes. Pure. */
import type { Fleet, Node, TrainingJobSummary } from '../contract'
import { OVERVIEW } from '../words/overview'
import { isLaunchSuspended } from './act'
import { headline, sentence } from './format'
import { addressesOf, troubleOf } from './jobs'
import { nodeSteps } from './duty'
import { STATUSES, statusWord, type Tone } from './standing'

/** One thing that needs a person. `at`: when it began, in Unix seconds, if the lists contain the time. */
export interface AttentionItem {
  tone: Tone
  title: string
  text: string
  to: string
  at?: number
}

const WORDS = OVERVIEW.items
const SEVERITY: Tone[] = ['bad', 'warn', 'busy', 'idle', 'good']

/** Return what needs a person, failures first, and the newest first among items of the same tone. */
export function attention(
  jobs: readonly TrainingJobSummary[],
  fleets: readonly Fleet[],
  nodes: readonly Node[],
  now: number,
): AttentionItem[] {
  const addressOf = addressesOf(jobs)
  const ofJobs = jobs.flatMap((job): AttentionItem[] => {
    const place = { title: job.TrainingJobName, to: `/jobs/${encodeURIComponent(addressOf(job))}` }
    const trouble = troubleOf(job, now)
    if (trouble === 'failed') {
      return [{ ...place, tone: 'bad', text: `${WORDS.failed} ${headline(job.Reason)}`, at: job.TrainingEndTime }]
    }
    if (trouble === 'unprotected') return [{ ...place, tone: 'bad', text: WORDS.unprotected }]
    return []
  })
  const ofFleets = fleets.flatMap((fleet): AttentionItem[] => {
    const place = { title: fleet.FleetName, to: `/fleets/${encodeURIComponent(fleet.FleetName)}` }
    if (fleet.FleetStatus === 'frozen') return [{ ...place, tone: 'warn', text: WORDS.frozen(sentence(fleet.Reason)) }]
    if (!isLaunchSuspended(fleet)) return []
    return [{ ...place, tone: 'warn', text: WORDS.launchSuspended(sentence(fleet.Reason)) }]
  })
  const ofNodes = nodes.flatMap((node) =>
    nodeSteps([node]).map(({ text }): AttentionItem => ({
      tone: 'warn',
      title: node.NodeId,
      text,
      to: `/fleets/${encodeURIComponent(node.FleetName)}#${node.NodeId}`,
    })),
  )
  const severity = ({ tone }: AttentionItem) => SEVERITY.indexOf(tone)
  return [...ofJobs, ...ofFleets, ...ofNodes].toSorted((a, b) => severity(a) - severity(b) || (b.at ?? 0) - (a.at ?? 0))
}

/** How many jobs have a status. `word`: what the pages call the status. */
export interface StatusCount {
  status: string
  word: string
  tone: Tone
  count: number
}

/** Return the number of jobs of each status, in the order of urgency, without statuses that no job has. */
export const jobsByStatus = (jobs: readonly TrainingJobSummary[]): StatusCount[] =>
  Object.entries(STATUSES)
    .map(([status, tone]) => ({
      status,
      word: statusWord(status),
      tone,
      count: jobs.filter((job) => job.SecondaryStatus === status).length,
    }))
    .filter(({ count }) => count > 0)

/** Numbers of nodes of a fleet that work for jobs, are spare or are held. Every node is counted exactly once. */
export interface Capacity {
  inUse: number
  spare: number
  held: number
  /** Nodes that start, reboot or drain. */
  other: number
}

export function capacityOf(fleet: Pick<Fleet, 'FleetName'>, nodes: readonly Node[]): Capacity {
  const mine = nodes.filter((node) => node.FleetName === fleet.FleetName && node.NodeStatus !== 'gone')
  const number = (...statuses: Node['NodeStatus'][]) => mine.filter((node) => statuses.includes(node.NodeStatus)).length
  return {
    inUse: number('assigned'),
    spare: number('spare'),
    held: number('held'),
    other: number('joining', 'rebooting', 'draining'),
  }
}

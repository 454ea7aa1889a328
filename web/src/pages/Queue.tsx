/** The jobs that wait for nodes: what each job waits for, which jobs are ahead of it, and what would start it. */
import { useQueries, useQuery } from '@tanstack/react-query'

import { useJobAddresses } from '../api/addresses'
import { fleetsQuery, jobQuery, jobsQuery } from '../api/queries'
import type { Fleet, TrainingJob, TrainingJobSummary } from '../contract'
import { count, sentence } from '../model/format'
import { queueOf, waiting as waitingOf, waysOutOfQueue } from '../model/queue'
import { statusOf, type VerdictLine } from '../model/standing'
import { Ago, Empty, FleetLink, JobLink, Loading, Shown, Status } from '../parts/Basics'
import { Card } from '../parts/Card'
import { Page } from '../parts/PageHead'
import { Table } from '../parts/Table'
import { QUEUE } from '../words/queue'

/** The page requests the descriptions of at most this many jobs. */
const MOST = 50

export default function QueuePage() {
  const query = useQuery(jobsQuery)
  const fleets = useQuery(fleetsQuery).data ?? []
  const addressOf = useJobAddresses()
  const candidates = queueOf(query.data ?? [])
  const described = useQueries({ queries: candidates.slice(0, MOST).map((job) => jobQuery(addressOf(job))) })
  const waiting = waitingOf(described.flatMap((each) => each.data ?? []))
  const queued = new Set(waiting.map((job) => job.RunId))
  const names = [...new Set(waiting.map((job) => job.FleetName))]
  const isLoading = !waiting.length && described.some((each) => each.isPending)
  return (
    <Page title={QUEUE.title} verdict={query.data && !isLoading ? verdictOf(waiting) : undefined}>
      <Shown query={query}>
        {(jobs) =>
          waiting.length ? (
            names.map((name) => (
              <FleetQueue
                key={name}
                name={name}
                fleet={fleets.find((each) => each.FleetName === name)}
                jobs={jobs}
                waiting={waiting.filter((job) => job.FleetName === name)}
                queued={queued}
              />
            ))
          ) : isLoading ? (
            <Loading />
          ) : (
            <Empty {...QUEUE.empty} command="everstep jobs list" />
          )
        }
      </Shown>
      {candidates.length > MOST && <p className="dim">{QUEUE.limit(MOST, candidates.length)}</p>}
    </Page>
  )
}

function verdictOf(waiting: readonly TrainingJob[]): VerdictLine {
  const words = QUEUE.verdict
  if (!waiting.length) return { tone: 'good', lead: words.none }
  const first = waiting[0]!
  const nodes = waiting.reduce((sum, job) => sum + job.NodeCount, 0)
  return {
    tone: 'busy',
    lead: words.waiting(waiting.length, nodes),
    text: words.first(first.TrainingJobName, first.FleetName),
  }
}

interface FleetQueueProps {
  name: string
  fleet?: Fleet
  jobs: TrainingJobSummary[]
  /** The waiting jobs of this fleet, in their order. */
  waiting: TrainingJob[]
  /** RunIds of the waiting jobs of all fleets. */
  queued: ReadonlySet<string>
}

function FleetQueue({ name, fleet, jobs, waiting, queued }: FleetQueueProps) {
  const addressOf = useJobAddresses()
  const columns = QUEUE.columns
  const ways = (job: TrainingJob) => (
    <ul className="plain">
      {waysOutOfQueue(job, jobs, fleet, queued).map((way) => (
        <li key={way}>{way}</li>
      ))}
    </ul>
  )
  return (
    <Card
      isFlush
      title={<FleetLink name={name} />}
      actions={fleet && <span className="dim">{QUEUE.capacity(fleet.NodeCount, fleet.MaxNodeCount)}</span>}
    >
      <Table
        label={`${QUEUE.title}: ${name}`}
        rows={waiting}
        keyOf={(job) => job.RunId}
        columns={[
          [columns.place, (job) => job.QueuePosition ?? '–', 'n'],
          [columns.job, (job) => <JobLink name={job.TrainingJobName} address={addressOf(job)} />, 'name'],
          [columns.status, ({ SecondaryStatus: status }) => <Status {...statusOf(status)} />],
          [columns.nodes, (job) => count(job.NodeCount), 'n'],
          [columns.priority, (job) => job.Priority, 'n'],
          [columns.reason, (job) => sentence(job.Reason), 'reason'],
          [columns.ahead, (job) => <JobsAhead names={job.QueuedBehind ?? []} />],
          [columns.freed, ways, 'reason'],
          [columns.created, (job) => <Ago at={job.CreationTime} />, 'moment'],
        ]}
      />
    </Card>
  )
}

function JobsAhead({ names }: { names: readonly string[] }) {
  if (!names.length) return QUEUE.noneAhead
  return (
    <span>
      {names.map((name) => (
        <div key={name} className="nowrap">
          <JobLink name={name} />
        </div>
      ))}
    </span>
  )
}

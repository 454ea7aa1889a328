/** The jobs that wait for nodes: what each job waits for, which jobs are ahead of it, and what would start it. */
import { useDocumentTitle } from '@mantine/hooks'
import { useQueries, useQuery } from '@tanstack/react-query'
import { Link } from 'react-router'

import { useJobAddresses } from '../api/addresses'
import { fleetsQuery, jobQuery, jobsQuery } from '../api/queries'
import type { Fleet, TrainingJob, TrainingJobSummary } from '../contract'
import { count, sentence } from '../model/format'
import { queueOf, waiting as waitingOf, waysOutOfQueue } from '../model/queue'
import { statusWord } from '../model/standing'
import { Ago, Empty, JobLink, Loading, Shown, Status, toneOf } from '../parts/Basics'
import { Card } from '../parts/Card'
import { PageHead, type VerdictLine } from '../parts/PageHead'
import { QUEUE } from '../words/queue'

/** The page requests the descriptions of at most this many jobs. */
const MOST = 50

export default function QueuePage() {
  useDocumentTitle('Queue, Everstep')
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
    <div className="stack">
      <PageHead title={QUEUE.title} verdict={query.data && !isLoading ? verdictOf(waiting) : undefined} />
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
            <Empty title={QUEUE.empty.title} command="everstep jobs list">
              {QUEUE.empty.text}
            </Empty>
          )
        }
      </Shown>
      {candidates.length > MOST && <p className="dim">{QUEUE.limit(MOST, candidates.length)}</p>}
    </div>
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
  return (
    <Card
      isFlush
      title={<Link to={`/fleets/${encodeURIComponent(name)}`}>{name}</Link>}
      actions={fleet && <span className="dim">{QUEUE.capacity(fleet.NodeCount, fleet.MaxNodeCount)}</span>}
    >
      <div className="scroll" tabIndex={0} role="region" aria-label={`${QUEUE.title}: ${name}`}>
        <table className="grid stacked">
          <thead>
            <tr>
              <th className="n">{columns.place}</th>
              <th>{columns.job}</th>
              <th>{columns.status}</th>
              <th className="n">{columns.nodes}</th>
              <th className="n">{columns.priority}</th>
              <th>{columns.reason}</th>
              <th>{columns.ahead}</th>
              <th>{columns.freed}</th>
              <th>{columns.created}</th>
            </tr>
          </thead>
          <tbody>
            {waiting.map((job) => (
              <tr key={job.RunId}>
                <td className="n" data-name={columns.place}>
                  {job.QueuePosition ?? '–'}
                </td>
                <td className="name" data-name={columns.job}>
                  <JobLink name={job.TrainingJobName} address={addressOf(job)} />
                </td>
                <td data-name={columns.status}>
                  <Status tone={toneOf(job.SecondaryStatus)} word={statusWord(job.SecondaryStatus)} />
                </td>
                <td className="n" data-name={columns.nodes}>
                  {count(job.NodeCount)}
                </td>
                <td className="n" data-name={columns.priority}>
                  {job.Priority}
                </td>
                <td className="reason">{sentence(job.Reason)}</td>
                <td data-name={columns.ahead}>
                  <JobsAhead names={job.QueuedBehind ?? []} />
                </td>
                <td className="reason">
                  <ul className="plain">
                    {waysOutOfQueue(job, jobs, fleet, queued).map((way) => (
                      <li key={way}>{way}</li>
                    ))}
                  </ul>
                </td>
                <td className="moment" data-name={columns.created}>
                  <Ago at={job.CreationTime} />
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
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

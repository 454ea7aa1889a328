/** Who waits for nodes, why, who is ahead, and what would free them. */
import { useDocumentTitle } from '@mantine/hooks'
import { useQueries, useQuery } from '@tanstack/react-query'
import { Link } from 'react-router'

import { useJobAddresses } from '../api/addresses'
import { fleetsQuery, jobQuery, jobsQuery } from '../api/queries'
import type { Fleet, TrainingJob, TrainingJobSummary } from '../contract'
import { count, sentence } from '../model/format'
import { freedBy, queueOf, waiting as waitingOf } from '../model/queue'
import { Ago, Empty, JobLink, Loading, Shown, Status, toneOf } from '../parts/Basics'

/** Of the longest queue, so many are described. */
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
  return (
    <div className="stack">
      <h1>Queue</h1>
      <Shown query={query}>
        {(jobs) =>
          waiting.length ? (
            [...new Set(waiting.map((job) => job.FleetName))].map((name) => (
              <OfFleet key={name} name={name} fleet={fleets.find((each) => each.FleetName === name)} jobs={jobs} waiting={waiting.filter((job) => job.FleetName === name)} queued={queued} />
            ))
          ) : described.some((each) => each.isPending) ? (
            <Loading />
          ) : (
            <Empty title="Nobody waits" command="everstep jobs list">
              A job waits here while its fleet has not enough nodes for all of it: higher priority first, then the oldest.
            </Empty>
          )
        }
      </Shown>
      {candidates.length > MOST && <p className="dim">The first {MOST} of {count(candidates.length)}.</p>}
    </div>
  )
}

function OfFleet({ name, fleet, jobs, waiting, queued }: { name: string; fleet?: Fleet; jobs: TrainingJobSummary[]; waiting: TrainingJob[]; queued: ReadonlySet<string> }) {
  const addressOf = useJobAddresses()
  return (
    <section className="card">
      <div className="row" style={{ marginBottom: 10 }}>
        <h2 style={{ margin: 0 }}>
          <Link to={`/fleets/${encodeURIComponent(name)}`}>{name}</Link>
        </h2>
        {fleet && (
          <span className="dim">
            {count(fleet.NodeCount)} of at most {count(fleet.MaxNodeCount)} nodes
          </span>
        )}
      </div>
      <div className="scroll">
        <table className="grid stacked">
          <thead>
            <tr>
              <th className="n">Place</th>
              <th>Job</th>
              <th>Status</th>
              <th className="n">Nodes</th>
              <th className="n">Priority</th>
              <th>Why it waits</th>
              <th>Ahead of it</th>
              <th>What would free it</th>
              <th>Created</th>
            </tr>
          </thead>
          <tbody>
            {waiting.map((job) => (
              <tr key={job.RunId}>
                <td className="n" data-name="Place">{job.QueuePosition ?? '–'}</td>
                <td data-name="Job"><JobLink name={job.TrainingJobName} address={addressOf(job)} /></td>
                <td data-name="Status"><Status tone={toneOf(job.SecondaryStatus)} word={job.SecondaryStatus} /></td>
                <td className="n" data-name="Nodes">{count(job.NodeCount)}</td>
                <td className="n" data-name="Priority">{job.Priority}</td>
                <td className="reason">{sentence(job.Reason)}</td>
                <td data-name="Ahead of it">{(job.QueuedBehind ?? []).length ? job.QueuedBehind.map((each) => <div key={each}><JobLink name={each} /></div>) : 'nobody'}</td>
                <td className="reason">
                  <ul className="plain">
                    {freedBy(job, jobs, fleet, queued).map((each) => (
                      <li key={each}>{each}</li>
                  ))}
                  </ul>
                </td>
                <td data-name="Created"><Ago at={job.CreationTime} /></td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  )
}

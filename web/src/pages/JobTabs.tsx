/** Protection, checkpoints and events of a job. */
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useSearchParams } from 'react-router'

import { useJobAddress } from '../api/addresses'
import { checkpointsQuery, eventsQuery, olderEvents, protectionQuery } from '../api/queries'
import { ProtectionMatrix } from '../charts/ProtectionMatrix'
import type { TrainingJob } from '../contract'
import { bytes, count, percent, plural } from '../model/format'
import { losses } from '../model/matrix'
import { hook, jobFigures, shown } from '../model/figures'
import { Ago, Empty, FactList, Filter, NodeLink, Shown, Status, toneOf, useStaleSeconds } from '../parts/Basics'
import { Doing } from '../parts/Doing'
import { Stacks } from '../parts/Stacks'

export function ProtectionTab({ job }: { job: TrainingJob }) {
  const query = useQuery(protectionQuery(useJobAddress(job)))
  const staleSeconds = useStaleSeconds()
  return (
    <Shown query={query}>
      {(protection) => {
        const figures = jobFigures(job, { protection, staleSeconds })
        return (
        <div className="stack">
          <section className="card">
            <FactList
              facts={[
                ['State', <Status key="state" tone={figures.protectionTone} word={figures.protection} />, hook(figures, 'protection')],
                ['Committed', figures.committedStep === undefined ? '–' : <>step {shown(figures, 'committedStep')}, <Ago at={protection.CommittedAt} /></>, hook(figures, 'committedStep')],
                ['On its way', protection.ProposedStep < 0 ? '–' : `step ${count(protection.ProposedStep)}`],
                protection.ParityGroupSize === undefined ? ['Copies asked for', `${protection.Copies}, the owner’s included`] : ['Parity', `survives any one lost node per group of ${protection.ParityGroupSize}`],
                ['Newest in S3', protection.LastCheckpoint ? <>step {shown(figures, 'checkpointStep')}, <Ago at={protection.LastCheckpoint.CompletedAt} /></> : 'nothing', hook(figures, 'checkpointStep')],
              ]}
            />
            {protection.Reason && <p style={{ marginTop: 12 }}>{protection.Reason}</p>}
          </section>
          {(protection.RecoveryOdds ?? []).length > 0 && (
            <section className="card">
              <h2>If several are lost at once</h2>
              <div className="scroll" tabIndex={0} role="region" aria-label="If several are lost at once">
              <table className="grid">
                <thead>
                  <tr>
                    <th>Lost</th>
                    <th>Every shard survives in memory</th>
                    <th>Otherwise</th>
                  </tr>
                </thead>
                <tbody>
                  {losses(protection).map(({ lost, probability }) => (
                    <tr key={lost}>
                      <td>any {lost}</td>
                      <td>
                        <Status tone={probability >= 1 ? 'good' : probability > 0.5 ? 'warn' : 'bad'} word={probability >= 1 ? 'always' : `in ${percent(probability)} of the cases`} />
                      </td>
                      <td className="dim">
                        {probability >= 1 ? '–' : protection.LastCheckpoint ? `back to step ${count(protection.LastCheckpoint.Step)} in S3, ${plural(Math.max(0, protection.CommittedStep - protection.LastCheckpoint.Step), 'step')} again` : 'back to the start: nothing is in S3'}
                      </td>
                    </tr>
                  ))}
                </tbody>
              </table>
              </div>
              <p className="dim" style={{ marginTop: 8 }}>
                Counted over all sets of so many nodes or failure domains, for the holders in view now. {(protection.DomainOdds ?? []).length ? 'A failure domain is the network node that instances hang on.' : 'AWS has not told the failure domains of these nodes.'}
              </p>
              {(protection.FatalDomains ?? []).length > 0 && (
                <p>
                  <Status tone="warn" word="One domain is enough" /> All copies of some shard are below {protection.FatalDomains.join(', ')}.
                </p>
              )}
            </section>
          )}
          {(protection.Shards ?? []).length ? (
            <section className="card">
              <h2>Who holds what</h2>
              <ProtectionMatrix protection={protection} />
            </section>
          ) : (
            <Empty title="No shard is held in memory">{protection.Reason}</Empty>
          )}
        </div>
        )
      }}
    </Shown>
  )
}

export function CheckpointsTab({ job }: { job: TrainingJob }) {
  return (
    <div className="stack">
      <UploadLine job={job} />
      <CheckpointTable job={job} />
    </div>
  )
}

/** The checkpoint that is being uploaded, and the rank that is behind the others. */
function UploadLine({ job }: { job: TrainingJob }) {
  const upload = job.CheckpointActivity?.Upload
  if (upload === undefined) return null
  const share = upload.TotalBytes ? upload.StoredBytes / upload.TotalBytes : 0
  const slowest = `rank ${upload.SlowestRank}: ${bytes(upload.SlowestStoredBytes)} of ${bytes(upload.SlowestTotalBytes)}`
  return <p title={upload.SlowestObject}>{`Uploading the checkpoint of step ${count(upload.Step)}: ${percent(share)} (${slowest})`}</p>
}

function CheckpointTable({ job }: { job: TrainingJob }) {
  const query = useQuery(checkpointsQuery(useJobAddress(job)))
  return (
    <Shown query={query}>
      {(checkpoints) =>
        checkpoints.length ? (
          <section className="card scroll">
            <table className="grid stacked">
              <thead>
                <tr>
                  <th>Step</th>
                  <th>Status</th>
                  <th>Launch</th>
                  <th className="n">Size</th>
                  <th>Complete</th>
                  <th>Read back</th>
                  <th>Manifest</th>
                </tr>
              </thead>
              <tbody>
                {checkpoints.map((each) => (
                  <tr key={`${each.Step}-${each.Generation}`}>
                    <td data-name="Step">{count(each.Step)}</td>
                    <td data-name="Status">
                      <Status tone={toneOf(each.Verification === 'Damaged' ? each.Verification : each.Status)} word={each.Status} />
                      {each.IsPinned && <div className="dim">pinned</div>}
                    </td>
                    <td data-name="Launch">{each.Generation}</td>
                    <td className="n" data-name="Size">{bytes(each.Bytes)}</td>
                    <td data-name="Complete"><Ago at={each.CompletionTime} /></td>
                    <td data-name="Read back">
                      {each.Verification === undefined || each.Verification === 'NotVerified' ? <span className="dim">not yet</span> : <Status tone={toneOf(each.Verification)} word={each.Verification} />}
                      {each.VerificationTime !== undefined && <> <Ago at={each.VerificationTime} /></>}
                      {each.VerificationMessage && <div className="dim">{each.VerificationMessage}</div>}
                    </td>
                    <td className="reason mono">{each.S3Uri}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </section>
        ) : (
          <Empty title="No checkpoint in S3">
            {`Checkpoints are made ${job.CheckpointActivity?.Policy ?? 'when the job stops'}.${job.CheckpointActivity?.NextStep === undefined ? '' : ` The next is due at step ${count(job.CheckpointActivity.NextStep)}.`} The steps in memory are under Protection.`}
          </Empty>
        )
      }
    </Shown>
  )
}

const MOST_ROWS = 500

export function EventsTab({ job }: { job: TrainingJob }) {
  return <EventList scope={{ job: useJobAddress(job) }} />
}

/** Newest first; the filter is in the URL. */
export function EventList({ scope, most = MOST_ROWS }: { scope: { job?: string; fleet?: string }; most?: number }) {
  const query = useQuery(eventsQuery(scope))
  const [search, setSearch] = useSearchParams()
  const client = useQueryClient()
  const filter = search.get('q') ?? ''
  return (
    <Shown query={query}>
      {({ events, older }) => {
        const found = events.filter((event) => `${event.Type} ${event.Message} ${event.NodeId ?? ''}`.toLowerCase().includes(filter.toLowerCase())).toReversed()
        return (
          <section className="card stack">
            <Filter label="Filter events" placeholder="Filter by type, text or node" value={filter} onChange={(value) => setSearch(value ? { q: value } : {}, { replace: true })} />
            {found.length ? (
              <div className="scroll">
                <table className="grid stacked">
                  <thead>
                    <tr>
                      <th>When</th>
                      <th>Event</th>
                      <th>Message</th>
                      <th>Node</th>
                    </tr>
                  </thead>
                  <tbody>
                    {found.slice(0, most).map((event) => (
                      <tr key={event.EventId}>
                        <td data-name="When"><Ago at={event.Time} /></td>
                        <td data-name="Event">{event.Type}</td>
                        <td className="reason">
                          {event.Message}
                          <Stacks event={event} />
                        </td>
                        <td data-name="Node">{event.NodeId ? <NodeLink id={event.NodeId} fleet={event.FleetName} /> : '–'}</td>
                      </tr>
                    ))}
                  </tbody>
                </table>
              </div>
            ) : (
              <p className="dim">{events.length ? 'No event has this in it.' : 'Nothing has happened yet.'}</p>
            )}
            {found.length > most && <p className="dim">The newest {most} of {count(found.length)}; the filter finds older ones.</p>}
            {older !== undefined && (
              <div className="row">
                <Doing does={() => olderEvents(client, scope)}>Ask for older events</Doing>
                <span className="dim">The newest {count(events.length)} are here, back to <Ago at={events[0]?.Time} />; the filter looks at these.</span>
              </div>
            )}
          </section>
        )
      }}
    </Shown>
  )
}

/** One incident: what failed, when, why, what was done, what was lost, and whether it is over. */
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery } from '@tanstack/react-query'
import { Link, useParams } from 'react-router'

import { eventsQuery, incidentQuery, jobQuery } from '../api/queries'
import type { Incident } from '../contract'
import { count, duration, plural, sentence, utc } from '../model/format'
import { story } from '../model/incident'
import { causeWords, phaseLengths } from '../model/verdict'
import { Ago, FactList, JobLink, NodeLink, Shown, Status, ToneIcon, Unbroken, useNow } from '../parts/Basics'
import { PhaseBar, SOURCES } from '../parts/IncidentTable'

const AROUND_SECONDS = 30

export default function IncidentPage() {
  const { id = '' } = useParams()
  useDocumentTitle(`Incident ${id}, Everstep`)
  const query = useQuery(incidentQuery(id))
  return <Shown query={query}>{(incident) => <Told incident={incident} />}</Shown>
}

function Told({ incident }: { incident: Incident }) {
  const now = useNow()
  const job = useQuery(jobQuery(incident.TrainingJobName)).data
  const events = useQuery(eventsQuery({ job: incident.TrainingJobName })).data ?? []
  const end = incident.ClosedAt ?? now
  const near = events.filter((event) => event.Time >= incident.FailedAt - AROUND_SECONDS && event.Time <= end + AROUND_SECONDS).slice(0, 200)
  const nodes = (ids?: string[]) => (ids?.length ? ids.map((id) => <div key={id}><NodeLink id={id} fleet={job?.FleetName} /></div>) : 'none')
  const isOpen = incident.ClosedAt === undefined
  const told = story(incident, job, now)
  return (
    <div className="stack">
      <div>
        <div className="dim">
          <Link to="/incidents">Incidents</Link> / <JobLink name={incident.TrainingJobName} />
        </div>
        <div className="row">
          <h1>{sentence(causeWords(incident.Cause)).slice(0, -1)}</h1>
          <Status tone={isOpen ? 'busy' : 'good'} word={incident.Phase} />
          <span className="dim mono">{incident.IncidentId}</span>
        </div>
      </div>
      <div className="fold four">
        {told.map((each) => (
          <section key={each.question} className={`card say tone-${each.tone}`}>
            <div className="q">{each.question}</div>
            <div className="a">
              <ToneIcon tone={each.tone} size={20} /> <Unbroken text={each.title} />
            </div>
            <p><Unbroken text={each.text} /></p>
          </section>
        ))}
      </div>
      <section className="card">
        <h2>Where the {duration(end - incident.FailedAt)} went</h2>
        <PhaseBar incident={incident} height={26} width="100%" />
        <ul className="legend">
          {phaseLengths(incident, now).map(({ phase, seconds, isOpen: isNow }) => (
            <li key={phase}>
              <span className="key" style={{ background: `var(--b-${phase})` }} />
              <span>
                {phase}
                {isNow && <span className="dim"> now</span>}
              </span>
              <span>{duration(seconds)}</span>
            </li>
          ))}
        </ul>
      </section>
      <div className="split">
        <section className="card">
          <h2>Evidence</h2>
          {(incident.Evidence ?? []).length ? (
            <ul>
              {incident.Evidence.map((each) => (
                <li key={each}>{sentence(each)}</li>
              ))}
            </ul>
          ) : (
            <p className="dim">None was recorded.</p>
          )}
        </section>
        <section className="card">
          <h2>Decision</h2>
          <p>{sentence(incident.Decision ?? '')}</p>
          <p className="dim">{sentence(incident.Reason ?? '')}</p>
        </section>
      </div>
      <section className="card">
        <FactList
          facts={[
            ['Failed', <span key="f">{utc(incident.FailedAt)}, <Ago at={incident.FailedAt} /></span>],
            ['Noticed', utc(incident.OpenedAt)],
            ['Over', incident.ClosedAt === undefined ? 'not yet' : utc(incident.ClosedAt)],
            ['Launch', `${incident.GenerationBefore} → ${incident.GenerationAfter ?? '…'}`],
            ['Step', incident.FromStep === undefined ? `reached ${count(incident.ReachedStep ?? 0)}` : `reached ${count(incident.ReachedStep ?? 0)}, resumed from ${count(incident.FromStep)}`],
            ['Done again', incident.LostSteps === undefined ? 'not known yet' : plural(incident.LostSteps, 'step')],
            ['Restored from', incident.RestoreSource ? (SOURCES[incident.RestoreSource] ?? incident.RestoreSource) : 'not yet'],
            ['Sources', (incident.RankSources ?? []).length ? incident.RankSources.map((each) => <div key={each.FirstRank}>{each.FirstRank === each.LastRank ? `rank ${each.FirstRank}` : `ranks ${each.FirstRank}–${each.LastRank}`}: {SOURCES[each.Source] ?? each.Source}</div>) : 'not known'],
            ['Lost nodes', nodes(incident.InstanceIds)],
            ['Replaced by', nodes(incident.ReplacementInstanceIds)],
            ['Cost', incident.CostUsd === undefined ? 'the price of the nodes is not known' : `$${incident.CostUsd.toFixed(2)}`],
          ]}
        />
      </section>
      <section className="card">
        <h2>Events around it</h2>
        {near.length ? (
          <div className="scroll">
            <table className="grid stacked">
              <tbody>
                {near.map((event) => (
                  <tr key={event.EventId}>
                    <td data-name="After" className="n" title={utc(event.Time)}>
                      {event.Time < incident.FailedAt ? '−' : '+'}
                      {duration(Math.abs(event.Time - incident.FailedAt))}
                    </td>
                    <td data-name="Event">{event.Type}</td>
                    <td className="reason">{event.Message}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        ) : (
          <p className="dim">None within {AROUND_SECONDS} s.</p>
        )}
      </section>
      <p className="dim">
        <Link to={`/jobs/${encodeURIComponent(incident.TrainingJobName)}/logs?failure=${encodeURIComponent(incident.IncidentId)}`}>What the ranks printed at that moment</Link>. Stacks of ranks that stood still are in the job’s events.
      </p>
    </div>
  )
}

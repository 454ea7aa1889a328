/** One incident: what failed, when, why, what was done, what was lost, and whether it is over. */
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery } from '@tanstack/react-query'
import { Link, useParams } from 'react-router'

import { useJobAddresses } from '../api/addresses'
import { eventsAroundQuery, incidentQuery, jobQuery, nodesQuery, printedQuery, protectionQuery } from '../api/queries'
import type { Incident } from '../contract'
import { plain } from '../model/ansi'
import { clock, duration, plural, sentence, utc } from '../model/format'
import { story } from '../model/incident'
import { inLineOrder } from '../model/printed'
import { stacksOf } from '../model/stacks'
import { hook, incidentFigures, phaseHook, shown } from '../model/figures'
import { causeWords, isOver } from '../model/verdict'
import { Ago, FactList, type Fact, JobLink, NodeLink, RunbookLink, Shown, Status, ToneIcon, Unbroken, useNow } from '../parts/Basics'
import { PhaseBar, SOURCES } from '../parts/IncidentTable'
import { Stacks } from '../parts/Stacks'

const AROUND_SECONDS = 30

export default function IncidentPage() {
  const { id = '' } = useParams()
  useDocumentTitle(`Incident ${id}, Everstep`)
  const query = useQuery(incidentQuery(id))
  return <Shown query={query}>{(incident) => <Told incident={incident} />}</Shown>
}

function Told({ incident }: { incident: Incident }) {
  const now = useNow()
  const address = useJobAddresses()(incident)
  const described = useQuery(jobQuery(address)).data
  const job = described?.RunId === incident.RunId ? described : undefined // the name may be another run's by now
  const fleetNodes = useQuery({ ...nodesQuery(job?.FleetName), enabled: job !== undefined && (incident.InstanceIds ?? []).length > 0 }).data
  const protection = useQuery({ ...protectionQuery(address), enabled: job !== undefined && isOver(job) }).data
  const near = useQuery(eventsAroundQuery(incident, AROUND_SECONDS)).data ?? []
  const nodes = (ids: string[] | undefined, otherwise = 'none') => (ids?.length ? ids.map((id) => <div key={id}><NodeLink id={id} fleet={described?.FleetName} /></div>) : otherwise)
  const figures = incidentFigures(incident, now, job, { protection })
  const told = story(incident, job, now, { nodes: fleetNodes, protection })
  const looks = near.filter((event) => stacksOf(event).length > 0).toReversed()
  return (
    <div className="stack">
      <div>
        <div className="dim">
          <Link to="/incidents">Incidents</Link> / <JobLink name={incident.TrainingJobName} address={address} />
        </div>
        <div className="row">
          <h1>{sentence(causeWords(incident.Cause)).slice(0, -1)}</h1>
          <span {...hook(figures, 'phase')}><Status tone={figures.phaseTone} word={figures.phase} /></span>
          <span className="dim mono">{incident.IncidentId}</span>
          <RunbookLink section={incident.Cause} />
        </div>
      </div>
      <div className="fold four">
        {told.map((each) => (
          <section key={each.question} className={`card say tone-${each.tone}`}>
            <div className="q">{each.question}</div>
            <div className="a">
              <ToneIcon tone={each.tone} size={20} /> <span><Unbroken text={each.title} /></span>
            </div>
            <p><Unbroken text={each.text} /></p>
          </section>
        ))}
      </div>
      <section className="card">
        <h2>Where the <span {...hook(figures, 'totalSeconds')}>{shown(figures, 'totalSeconds')}</span> went</h2>
        <PhaseBar incident={incident} height={26} width="100%" />
        <ul className="legend">
          {figures.phases.map(({ phase, seconds, isOpen: isNow }) => (
            <li key={phase} {...phaseHook(incident, phase, seconds)}>
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
            ['Reached step', shown(figures, 'reachedStep'), hook(figures, 'reachedStep')],
            ['Resumed from step', shown(figures, 'resumedStep'), hook(figures, 'resumedStep')],
            ['Recomputed steps', shown(figures, 'recomputedSteps'), hook(figures, 'recomputedSteps')],
            ...(figures.unsavedSteps === undefined ? [] : [['Lost', plural(figures.unsavedSteps, 'step'), hook(figures, 'unsavedSteps')] as Fact]),
            ['Restored from', incident.RestoreSource ? (SOURCES[incident.RestoreSource] ?? incident.RestoreSource) : 'not yet'],
            ['Sources', (incident.RankSources ?? []).length ? incident.RankSources.map((each) => <div key={each.FirstRank}>{each.FirstRank === each.LastRank ? `rank ${each.FirstRank}` : `ranks ${each.FirstRank}–${each.LastRank}`}: {SOURCES[each.Source] ?? each.Source}</div>) : 'not known'],
            ['Happened on', nodes(incident.FaultedInstanceIds, 'no node in particular')],
            ['Lost nodes', nodes(incident.InstanceIds)],
            ['Replaced by', nodes(incident.ReplacementInstanceIds)],
            ['Cost', figures.costUsd === undefined ? 'the price of the nodes is not known' : shown(figures, 'costUsd'), hook(figures, 'costUsd')],
          ]}
        />
      </section>
      {looks.length > 0 && (
        <section className="card" aria-label="Where the ranks stood">
          <h2>Where the ranks stood</h2>
          {looks.map((event, index) => (
            <div key={event.EventId}>
              <p>
                <Ago at={event.Time} />: {sentence(event.Message)}
              </p>
              <Stacks event={event} isOpen={index === 0} />
            </div>
          ))}
        </section>
      )}
      {job && <Printed incident={incident} />}
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
    </div>
  )
}

/** The last lines of all ranks before the failure, as they are. */
function Printed({ incident }: { incident: Incident }) {
  const query = useQuery(printedQuery(incident))
  const address = useJobAddresses()(incident)
  return (
    <section className="card" aria-label="What the ranks printed last">
      <div className="row between">
        <h2>What the ranks printed last</h2>
        <Link to={`/jobs/${encodeURIComponent(address)}/logs?failure=${encodeURIComponent(incident.IncidentId)}`}>That moment in the log</Link>
      </div>
      <Shown query={query} rows={3}>
        {(lines) =>
          lines.length ? (
            <pre className="log wrap" tabIndex={0}>
              {inLineOrder(lines).map((line) => `${clock(line.Timestamp)} ${line.Rank === undefined ? line.NodeId : `rank ${line.Rank}`}  ${plain(line.Message)}`).join('\n')}
            </pre>
          ) : (
            <p className="dim">Nothing that is kept.</p>
          )
        }
      </Shown>
    </section>
  )
}

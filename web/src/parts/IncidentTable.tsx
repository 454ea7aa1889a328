import { Link } from 'react-router'

import { useJobAddresses } from '../api/addresses'
import type { Incident } from '../contract'
import { count, duration } from '../model/format'
import { causeWords, phaseLengths } from '../model/verdict'
import { Ago, JobLink, Status, toneOf, useNow } from './Basics'

/** Where the state came from, in words. */
export const SOURCES: Record<string, string> = { local: 'the node’s own memory', peer: 'another node’s memory', parity: 'parity', s3: 'S3' }

/** A list of incidents; each row leads to its page. */
/** `lost`: how many steps an incident cost, where the page knows more of its job than the incident says. */
export function IncidentTable({ incidents, withJob = true, lost = (each) => each.LostSteps }: { incidents: Incident[]; withJob?: boolean; lost?: (incident: Incident) => number | undefined }) {
  const now = useNow()
  const addressOf = useJobAddresses()
  return (
    <div className="scroll">
      <table className="grid stacked">
        <thead>
          <tr>
            <th>Cause</th>
            {withJob && <th>Job</th>}
            <th>Phase</th>
            <th>Failed</th>
            <th className="n">Interrupted</th>
            <th>In phases</th>
            <th className="n">Lost steps</th>
            <th>Restored from</th>
          </tr>
        </thead>
        <tbody>
          {incidents.map((each) => (
            <tr key={each.IncidentId}>
              <td data-name="Cause">
                <Link to={`/incidents/${encodeURIComponent(each.IncidentId)}`}>{causeWords(each.Cause)}</Link>
              </td>
              {withJob && (
                <td data-name="Job">
                  <JobLink name={each.TrainingJobName} address={addressOf(each)} />
                </td>
              )}
              <td data-name="Phase">
                <Status tone={each.ClosedAt === undefined ? 'busy' : toneOf(each.Phase)} word={each.Phase} />
              </td>
              <td data-name="Failed">
                <Ago at={each.FailedAt} />
              </td>
              <td className="n" data-name="Interrupted">
                {duration((each.ClosedAt ?? now) - each.FailedAt)}
              </td>
              <td data-name="In phases">
                <PhaseBar incident={each} />
              </td>
              <td className="n" data-name="Lost steps">
                {lost(each) === undefined ? '–' : count(lost(each)!)}
              </td>
              <td data-name="Restored from">{each.RestoreSource ? (SOURCES[each.RestoreSource] ?? each.RestoreSource) : '–'}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  )
}

/** What the colours of a phase bar mean, with how long each took. */
export function PhaseLengths({ incident }: { incident: Incident }) {
  const now = useNow()
  return (
    <ul className="phases" aria-label="Phases">
      {phaseLengths(incident, now).map(({ phase, seconds, isOpen }) => (
        <li key={phase}>
          <span className="key" style={{ background: `var(--b-${phase})` }} /> {phase} {duration(seconds)}
          {isOpen && ' so far'}
        </li>
      ))}
    </ul>
  )
}

export function PhaseBar({ incident, height = 14, width = 140 }: { incident: Incident; height?: number; width?: number | string }) {
  const now = useNow()
  const lengths = phaseLengths(incident, now)
  const label = lengths.map(({ phase, seconds }) => `${phase} ${duration(seconds)}`).join(', ')
  return (
    <div className="bar" style={{ height, width, borderRadius: 3 }} role="img" aria-label={label} title={label}>
      {lengths.map(({ phase, seconds }) => (
        <span key={phase} style={{ flexGrow: Math.max(0.001, seconds), flexBasis: 0, background: `var(--b-${phase})` }} />
      ))}
    </div>
  )
}

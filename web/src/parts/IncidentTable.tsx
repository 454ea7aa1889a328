import { Link } from 'react-router'

import { useJobAddresses } from '../api/addresses'
import type { Incident } from '../contract'
import { duration } from '../model/format'
import {
  hook,
  incidentFigures,
  phaseHook,
  phaseLengths,
  phaseTexts,
  shown,
  type IncidentFigures,
} from '../model/figures'
import { phaseColor, phaseWords, sourceWords } from '../model/causes'
import { Ago, JobLink, Status, Unbroken, useNow } from './Basics'

interface Listed {
  incidents: Incident[]
  withJob?: boolean
  withOwner?: boolean
  /** Returns an incident's figures; by default, without figures that need the job. A job's page adds these figures. */
  figuresOf?: (incident: Incident) => IncidentFigures
}

/** A list of incidents. Each row links to the incident's page. */
export function IncidentTable({ incidents, withJob = true, withOwner = false, figuresOf }: Listed) {
  const now = useNow()
  const of = figuresOf ?? ((incident: Incident) => incidentFigures(incident, now))
  const addressOf = useJobAddresses()
  return (
    <div className="scroll">
      <table className="grid stacked">
        <thead>
          <tr>
            <th>What failed</th>
            {withJob && <th>Job</th>}
            <th>State</th>
            <th>Failed</th>
            <th className="n">Interrupted</th>
            <th>In phases</th>
            <th className="n">Recomputed steps</th>
            <th className="n">Cost</th>
            <th>Restored from</th>
            {withOwner && <th>Owner</th>}
          </tr>
        </thead>
        <tbody>
          {incidents
            .map((each) => ({ each, figures: of(each) }))
            .map(({ each, figures }) => (
              <tr key={each.IncidentId}>
                <td data-name="What failed">
                  <Link to={`/incidents/${encodeURIComponent(each.IncidentId)}`}>
                    <Unbroken text={each.Headline} />
                  </Link>
                </td>
                {withJob && (
                  <td className="nowrap" data-name="Job">
                    <JobLink name={each.TrainingJobName} address={addressOf(each)} />
                  </td>
                )}
                <td data-name="State" {...hook(figures, 'phase')}>
                  <Status tone={figures.phaseTone} word={figures.phase} />
                </td>
                <td className="nowrap" data-name="Failed">
                  <Ago at={each.FailedAt} />
                </td>
                <td className="n" data-name="Interrupted" {...hook(figures, 'totalSeconds')}>
                  {shown(figures, 'totalSeconds')}
                </td>
                <td data-name="In phases">
                  <PhaseBar incident={each} width={88} />
                </td>
                <td className="n" data-name="Recomputed steps" {...hook(figures, 'recomputedSteps')}>
                  {shown(figures, 'recomputedSteps')}
                </td>
                <td className="n" data-name="Cost" {...hook(figures, 'costUsd')}>
                  {shown(figures, 'costUsd')}
                </td>
                <td data-name="Restored from">{sourceWords(each.RestoreSource) || '–'}</td>
                {withOwner && <td data-name="Owner">{each.Owner ?? '–'}</td>}
              </tr>
            ))}
        </tbody>
      </table>
    </div>
  )
}

/** What the colors of a phase bar mean, with how long each phase took. */
export function PhaseLengths({ incident }: { incident: Incident }) {
  const now = useNow()
  const lengths = phaseLengths(incident, now)
  const texts = phaseTexts(lengths)
  return (
    <ul className="phases" aria-label="Phases">
      {lengths.map(({ phase, seconds, isOpen }, index) => (
        <li key={phase} title={duration(seconds)} {...phaseHook(incident, phase, seconds)}>
          <span className="key" style={{ background: phaseColor(phase, incident) }} />
          {` ${phaseWords(phase, incident)} ${texts[index]}`}
          {isOpen && ' so far'}
        </li>
      ))}
    </ul>
  )
}

interface Bar {
  incident: Incident
  /** Pixels. */
  height?: number
  /** Pixels, or a CSS length. */
  width?: number | string
}

/** The phases of an incident as parts of a bar, in proportion to their lengths. */
export function PhaseBar({ incident, height = 14, width = 140 }: Bar) {
  const now = useNow()
  const lengths = phaseLengths(incident, now)
  const texts = phaseTexts(lengths)
  const label = lengths.map(({ phase }, index) => `${phaseWords(phase, incident)} ${texts[index]}`).join(', ')
  const style = (phase: string, seconds: number) => ({
    flexGrow: Math.max(0.001, seconds),
    flexBasis: 0,
    background: phaseColor(phase, incident),
  })
  return (
    <div className="bar" style={{ height, width, borderRadius: 3 }} role="img" aria-label={label} title={label}>
      {lengths.map(({ phase, seconds }) => (
        <span key={phase} style={style(phase, seconds)} />
      ))}
    </div>
  )
}

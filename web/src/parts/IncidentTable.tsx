import { useJobAddresses } from '../api/addresses'
import type { Incident } from '../contract'
import { duration } from '../model/format'
import { hook, incidentFigures, phaseHook, phaseLengths, phaseTexts, type IncidentFigures } from '../model/figures'
import { phaseColor, phaseWords, sourceWords } from '../model/causes'
import { Ago, IncidentLink, JobLink, Status, Unbroken, useIsStale, useNow } from './Basics'
import { figureColumn, Table } from './Table'

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
  const isStale = useIsStale()
  const of = figuresOf ?? ((incident: Incident) => incidentFigures(incident, now, undefined, { isStale }))
  const addressOf = useJobAddresses()
  const headline = ({ each }: Row) => (
    <IncidentLink id={each.IncidentId}>
      <Unbroken text={each.Headline} />
    </IncidentLink>
  )
  const job = ({ each }: Row) => <JobLink name={each.TrainingJobName} address={addressOf(each)} />
  const figures = (row: Row) => row.figures
  return (
    <Table<Row>
      rows={incidents.map((each) => ({ each, figures: of(each) }))}
      keyOf={({ each }) => each.IncidentId}
      columns={[
        ['What failed', headline],
        withJob && ['Job', job, 'nowrap'],
        [
          'State',
          (row) => <Status tone={row.figures.phaseTone} word={row.figures.phase} />,
          undefined,
          (row) => hook(row.figures, 'phase'),
        ],
        ['Failed', ({ each }) => <Ago at={each.FailedAt} />, 'nowrap'],
        figureColumn('Interrupted', figures, 'totalSeconds'),
        ['In phases', ({ each }) => <PhaseBar incident={each} width={88} />],
        figureColumn('Recomputed steps', figures, 'recomputedSteps'),
        figureColumn('Cost', figures, 'costUsd'),
        ['Restored from', ({ each }) => sourceWords(each.RestoreSource) || '–'],
        withOwner && ['Owner', ({ each }) => each.Owner ?? '–'],
      ]}
    />
  )
}

interface Row {
  each: Incident
  figures: IncidentFigures
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

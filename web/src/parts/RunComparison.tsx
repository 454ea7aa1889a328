/** The compared jobs with their colours, and the settings in which they differ. */
import { useMemo } from 'react'
import { Link } from 'react-router'

import type { TrainingJob } from '../contract'
import { differences, type Difference } from '../model/compare'
import { METRICS } from '../words/metrics'
import { Table, type Column } from './Table'

const WORDS = METRICS.compare

interface Run {
  name: string
  colour: number
  hasFailed?: boolean
}

/** The first run is the job of the page, which cannot be removed. */
export function RunChips({ runs, onRemove }: { runs: readonly Run[]; onRemove: (name: string) => void }) {
  return (
    <ul className="plain row" aria-label={WORDS.runs}>
      {runs.map(({ name, colour, hasFailed }, index) => (
        <li className="run-chip" key={name}>
          <span className="key" style={{ background: `var(--c-${colour})` }} />
          {index ? <Link to={`/jobs/${encodeURIComponent(name)}/metrics`}>{name}</Link> : <span>{name}</span>}
          {hasFailed && <span className="dim">{WORDS.missing(name)}</span>}
          {index > 0 && (
            <button type="button" className="tool" aria-label={WORDS.remove(name)} onClick={() => onRemove(name)}>
              ×
            </button>
          )}
        </li>
      ))}
    </ul>
  )
}

export function DifferenceTable({ jobs }: { jobs: readonly TrainingJob[] }) {
  const rows = useMemo(() => differences(jobs), [jobs])
  return (
    <section className="card" aria-labelledby="differences">
      <h2 id="differences">{WORDS.title}</h2>
      {rows.length ? (
        <Table
          label={WORDS.title}
          isStacked={false}
          rows={rows}
          keyOf={({ name }) => name}
          columns={[
            [WORDS.setting, ({ name }) => name, 'mono'],
            ...jobs.map(({ TrainingJobName }, index): Column<Difference> => [
              TrainingJobName,
              ({ values }) => values[index] ?? WORDS.unset,
              'mono',
              ({ values }) => ({ className: values[index] === undefined ? 'dim' : 'mono' }),
            ]),
          ]}
        />
      ) : (
        <p className="dim">{WORDS.none}</p>
      )}
    </section>
  )
}

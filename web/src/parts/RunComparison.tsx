/** The compared jobs with their colours, and the settings in which they differ. */
import { useMemo } from 'react'
import { Link } from 'react-router'

import type { TrainingJob } from '../contract'
import { differences } from '../model/compare'
import { METRICS } from '../words/metrics'

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
        <div className="scroll" tabIndex={0} role="region" aria-label={WORDS.title}>
          <table className="grid">
            <thead>
              <tr>
                <th>{WORDS.setting}</th>
                {jobs.map((job) => (
                  <th key={job.RunId}>{job.TrainingJobName}</th>
                ))}
              </tr>
            </thead>
            <tbody>
              {rows.map(({ name, values }) => (
                <tr key={name}>
                  <td className="mono">{name}</td>
                  {values.map((value, index) => (
                    <td key={jobs[index]!.RunId} className={value === undefined ? 'dim' : 'mono'}>
                      {value ?? WORDS.unset}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : (
        <p className="dim">{WORDS.none}</p>
      )}
    </section>
  )
}

/** Where the time of a job went: one bar, and a list whose parts add up to the wall time. */
import type { Incident, TrainingJob } from '../contract'
import { jobFigures } from '../model/figures'
import { duration, percent } from '../model/format'
import { buckets } from '../model/time'
import { TIME } from '../words/jobTabs'

export function WhereTime({ job, now, open }: { job: Partial<TrainingJob>; now: number; open?: Incident }) {
  const { buckets: parts, wallSeconds } = buckets(job, now, open)
  if (!parts.length) return <p className="dim">{TIME.none}</p>
  const { ettrRatio } = jobFigures(job)
  const share = (seconds: number) => seconds / Math.max(1e-9, wallSeconds)
  const background = (name: string) => `var(--b-${name}, var(--b-rest))`
  const label = parts.map((part) => `${part.label} ${duration(part.seconds)}`).join(', ')
  return (
    <>
      <div className="bar" role="img" aria-label={label}>
        {parts.map(({ name, label: word, seconds }) => (
          <span
            key={name}
            style={{ flexGrow: share(seconds) * 1000, flexBasis: 0, background: background(name) }}
            title={`${word}: ${duration(seconds)}`}
          />
        ))}
      </div>
      <ul className="legend">
        {parts.map(({ name, label: word, what, owner, seconds }) => (
          <li key={name} title={owner}>
            <span className="key" style={{ background: background(name) }} />
            <span>
              {word} <span className="dim">{what}</span>
            </span>
            <span>
              {duration(seconds)} <span className="dim">{percent(share(seconds))}</span>
            </span>
            {owner && <small>{TIME.owner(owner)}</small>}
          </li>
        ))}
      </ul>
      <p className="dim">
        {TIME.total(duration(wallSeconds))}
        {ettrRatio !== undefined && ` ${TIME.ettr(percent(ettrRatio))}`}
      </p>
    </>
  )
}

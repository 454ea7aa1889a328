/** Where the time went: one bar whose parts add up to the job's wall time. */
import type { Incident, TrainingJob } from '../contract'
import { duration, percent } from '../model/format'
import { buckets } from '../model/time'

export function WhereTime({ job, now, open }: { job: Partial<TrainingJob>; now: number; open?: Incident }) {
  const { buckets: found, wallSeconds } = buckets(job, now, open)
  if (!found.length) return <p className="dim">No second has been counted yet.</p>
  const share = (seconds: number) => seconds / Math.max(1e-9, wallSeconds)
  return (
    <>
      <div className="bar" role="img" aria-label={found.map((bucket) => `${bucket.label} ${duration(bucket.seconds)}`).join(', ')}>
        {found.map((bucket) => (
          <span key={bucket.name} style={{ flexGrow: share(bucket.seconds) * 1000, flexBasis: 0, background: `var(--b-${bucket.name}, var(--b-rest))` }} title={`${bucket.label}: ${duration(bucket.seconds)}`} />
        ))}
      </div>
      <ul className="legend">
        {found.map((bucket) => (
          <li key={bucket.name}>
            <span className="key" style={{ background: `var(--b-${bucket.name}, var(--b-rest))` }} />
            <span>
              {bucket.label} <span className="dim">{bucket.what}</span>
            </span>
            <span>
              {duration(bucket.seconds)} <span className="dim">{percent(share(bucket.seconds))}</span>
            </span>
            <small>{bucket.name === 'train' ? '' : `who can shorten it: ${bucket.owner}`}</small>
          </li>
        ))}
      </ul>
      <p className="dim" style={{ marginTop: 10 }}>
        Together {duration(wallSeconds)}: all the time since the job was created
        {job.Reliability?.EttrRatio !== undefined && <>. ETTR {percent(job.Reliability.EttrRatio)}: training ÷ time since the first start, queueing not counted</>}.
      </p>
    </>
  )
}

import type { TrainingJobSummary } from '../contract'
import { count, percent } from '../model/format'
import { done } from '../model/progress'

/** How far a job is; the bar is there where its script has said how far it will go. */
export function Progress({ job }: { job: Pick<TrainingJobSummary, 'Boundary' | 'TargetStep'> }) {
  const ratio = done(job)
  const step = job.Boundary < 0 ? '–' : count(job.Boundary)
  if (ratio === undefined) return <>{step}</>
  return (
    <>
      {step} of {count(job.TargetStep!)}
      <div className="progress small" role="img" aria-label={`${percent(ratio)} done`} title={`${percent(ratio)} done`}>
        <div style={{ width: `${100 * ratio}%` }} />
      </div>
    </>
  )
}

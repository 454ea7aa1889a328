import { hook, shown, type JobFigures } from '../model/figures'

/** The step of a job. A job whose script declares a target also has a bar. */
export function Progress({ figures }: { figures: JobFigures }) {
  const { doneRatio, targetStep } = figures
  const step = <span {...hook(figures, 'step')}>{shown(figures, 'step')}</span>
  if (doneRatio === undefined || targetStep === undefined) return step
  const label = `${shown(figures, 'doneRatio')} done`
  return (
    <>
      {step} of <span {...hook(figures, 'targetStep')}>{shown(figures, 'targetStep')}</span>
      <div className="progress small" role="img" aria-label={label} title={label} {...hook(figures, 'doneRatio')}>
        <div style={{ width: `${100 * doneRatio}%` }} />
      </div>
    </>
  )
}

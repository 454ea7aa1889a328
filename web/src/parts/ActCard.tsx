import type { Duty } from '../contract'
import { isPressing } from '../model/duty'
import { dutyHook, type JobFigures } from '../model/figures'
import { DUTIES, DUTY, SECTIONS, toneOfDuty } from '../words/duty'
import { RunbookLink, ToneIcon, Unbroken } from './Basics'
import { Steps } from './Steps'

interface Props {
  duty: Duty
  figures: JobFigures
  runId: string
  /** The fleet of the nodes that the actions name. */
  fleet?: string
  /** Path of the form that submits a failed job again. */
  again?: string
}

/** What a person must do for a job, or can do: the reason, and the actions. */
export function ActCard({ duty, figures, ...context }: Props) {
  const section = SECTIONS[duty.Kind]
  return (
    <section
      className={`card act tone-${toneOfDuty(duty)}${isPressing(duty) ? ' pressing' : ''}`}
      aria-live="polite"
      aria-label={DUTY.title}
      {...dutyHook(figures, duty)}
    >
      <header>
        <h2>
          <ToneIcon tone={toneOfDuty(duty)} /> {DUTIES[duty.Urgency].title}
        </h2>
        {section && <RunbookLink section={section} />}
      </header>
      <p>
        <Unbroken text={[duty.Sentence, duty.Explanation].filter(Boolean).join(' ')} />
      </p>
      <Steps actions={duty.Actions} urgency={duty.Urgency} {...context} />
    </section>
  )
}

import { statementHook, type JobFigures } from '../model/figures'
import type { Act } from '../model/act'
import { isPressing } from '../model/duty'
import { DUTY } from '../words/duty'
import { RunbookLink, ToneIcon, Unbroken } from './Basics'
import { Steps } from './Steps'

interface Props {
  act: Act
  figures: JobFigures
  /** The fleet of the nodes that the steps name. */
  fleet?: string
}

/** What a person must do for a job, or can do: the reason, and the steps. */
export function ActCard({ act, figures, fleet }: Props) {
  return (
    <section
      className={`card act tone-${act.tone}${isPressing(act.urgency) ? ' pressing' : ''}`}
      aria-live="polite"
      aria-label={DUTY.title}
      {...statementHook(figures, 'act', act)}
    >
      <header>
        <h2>
          <ToneIcon tone={act.tone} /> {act.title}
        </h2>
        {act.section && <RunbookLink section={act.section} />}
      </header>
      <p>
        <Unbroken text={act.text} />
      </p>
      <Steps steps={act.steps} fleet={fleet} urgency={act.urgency} />
    </section>
  )
}

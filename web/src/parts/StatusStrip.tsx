import { dutyHook, hook, shown, statementHook } from '../model/figures'
import type { Verdict } from '../model/verdict'
import { DUTIES, toneOfDuty } from '../words/duty'
import { JOB } from '../words/job'
import { Status } from './Basics'

/** The state of a job in one line at the top of every tab except Overview. `rate`: steps per second, as text. */
export function StatusStrip({ name, verdict, rate }: { name: string; verdict: Verdict; rate?: string }) {
  const { figures, state, protection, duty } = verdict
  const words = JOB.strip
  return (
    <div className="strip" role="group" tabIndex={0} aria-label={words.label} title={verdict.line.lead}>
      <h1>{name}</h1>
      <span {...statementHook(figures, 'moving', state)}>
        <Status tone={state.tone} word={state.title} title={state.text} />
      </span>
      <span>
        <span className="dim">{words.step}</span> <strong {...hook(figures, 'step')}>{shown(figures, 'step')}</strong>
      </span>
      {rate !== undefined && (
        <span>
          <span className="dim">{words.rate}</span> <strong>{rate}</strong>
        </span>
      )}
      <span {...statementHook(figures, 'safe', protection)}>
        <Status tone={protection.tone} word={protection.title} title={protection.text} />
      </span>
      <span title={duty.Sentence} {...dutyHook(figures, duty)}>
        <Status tone={toneOfDuty(duty)} word={DUTIES[duty.Urgency].title} />
      </span>
    </div>
  )
}

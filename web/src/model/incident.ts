/** Whether an incident is over. Pure. */
import type { Incident } from '../contract'
import { INCIDENT, OUTCOMES } from '../words/incident'
import { phaseWords } from './causes'
import type { Statement } from './facts'
import { phaseLengths } from './figures'
import { ago, duration } from './format'

type Outcome = NonNullable<Incident['Outcome']>

/** Return how an incident ended. A list of incidents has no outcomes, so a closed one counts as recovered there. */
export const outcomeOf = ({ Outcome: outcome, ClosedAt }: Pick<Incident, 'Outcome' | 'ClosedAt'>): Outcome =>
  outcome ?? (ClosedAt === undefined ? 'Open' : 'Recovered')

/** For this long after its end, an incident is as important as an open one. */
const RECENT_SECONDS = 900

/** Whether the incident is open, ended a short time ago, or ended its job. `now`: Unix seconds. */
export const isRecent = (incident: Incident, now: number): boolean =>
  now - (incident.ClosedAt ?? now) < RECENT_SECONDS || outcomeOf(incident) === 'JobFailed'

/** Return whether the incident is over. `now`: Unix seconds. */
export function overWords(incident: Incident, now: number): Statement {
  const outcome = outcomeOf(incident)
  const words = INCIDENT.over
  const { tone } = OUTCOMES[outcome]
  const { ClosedAt } = incident
  if (ClosedAt === undefined) {
    const seconds = phaseLengths(incident, now).at(-1)?.seconds ?? 0
    return { tone, title: words.Open, text: words.phase(phaseWords(incident.Phase), duration(seconds)) }
  }
  return { tone, title: words[outcome], text: words.since(ago(ClosedAt, now)) }
}

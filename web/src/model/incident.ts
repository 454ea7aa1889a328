/** Whether an incident is over. Pure. */
import type { Incident } from '../contract'
import { INCIDENT, OUTCOMES } from '../words/incident'
import { phaseWords } from './causes'
import type { Statement } from './facts'
import { phaseLengths } from './figures'
import { ago, clock, duration, soon } from './format'

type Outcome = NonNullable<Incident['Outcome']>

/** Return how an incident ended. A list of incidents has no outcomes, so a closed one counts as recovered there. */
export const outcomeOf = ({ Outcome: outcome, ClosedAt }: Pick<Incident, 'Outcome' | 'ClosedAt'>): Outcome =>
  outcome ?? (ClosedAt === undefined ? 'Open' : 'Recovered')

type Wait = NonNullable<Incident['Wait']>

/** Return the missing nodes: "1 p5.48xlarge in us-east-2a". */
export const missingWords = ({ MissingNodeCount, InstanceType, AvailabilityZone }: Wait): string =>
  INCIDENT.wait.missing(MissingNodeCount, InstanceType, AvailabilityZone)

/** Return when the next attempt is: "in 12 min", or "now". `now`: Unix seconds. */
export const attemptWords = ({ NextAttemptTime: at }: Wait, now: number): string =>
  at <= now + 1 ? INCIDENT.wait.due : soon(at, now)

/** Return AWS's own words, shortened to the first sentence, and when the next attempts are. */
function waitWords(wait: Wait): string {
  const quote = wait.Message.split('. ')[0]!.replace(/\.$/, '')
  return `${INCIDENT.wait.text(quote, clock(wait.NextAttemptTime))} ${INCIDENT.wait.later}`
}

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
  if (incident.Wait !== undefined) {
    return { tone: 'busy', title: words.waits(missingWords(incident.Wait)), text: waitWords(incident.Wait) }
  }
  if (ClosedAt === undefined) {
    const seconds = phaseLengths(incident, now).at(-1)?.seconds ?? 0
    return { tone, title: words.Open, text: words.phase(phaseWords(incident.Phase, incident), duration(seconds)) }
  }
  return { tone, title: words[outcome], text: words.since(ago(ClosedAt, now)) }
}

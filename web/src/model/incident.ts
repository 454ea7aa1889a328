/** How an incident ended, or what happens in it now. Pure. */
import type { CapacityWait, Incident } from '../contract'
import { INCIDENT, OUTCOMES } from '../words/incident'
import { phaseWords } from './causes'
import { phaseLengths } from './figures'
import { duration, soon } from './format'
import type { Tone } from './standing'

/** Return the missing nodes: "1 p5.48xlarge in us-east-2a". */
export const missingWords = ({ MissingNodeCount, InstanceType, AvailabilityZone }: CapacityWait): string =>
  INCIDENT.wait.missing(MissingNodeCount, InstanceType, AvailabilityZone)

/** Return when the next attempt is: "in 12 min", or "now". `now`: Unix seconds. */
export const attemptWords = ({ NextAttemptTime: at }: CapacityWait, now: number): string =>
  at <= now + 1 ? INCIDENT.wait.due : soon(at, now)

/** Seconds after its end for which pages treat an incident like an open one. */
const RECENT_SECONDS = 900

/** Whether the incident is open, ended a short time ago, or ended its job. `now`: Unix seconds. */
export const isRecent = (incident: Incident, now: number): boolean =>
  now - (incident.ClosedAt ?? now) < RECENT_SECONDS || incident.Outcome === 'JobFailed'

/**
 * Return what happens now in an open incident. `now`: Unix seconds.
 *
 * undefined: the incident is closed, or the job waits for AWS: the page's verdict and cause then show the wait.
 */
export function presentWords(incident: Incident, now: number): string | undefined {
  if (incident.ClosedAt !== undefined || incident.Wait !== undefined) return undefined
  const seconds = phaseLengths(incident, now).at(-1)?.seconds ?? 0
  return INCIDENT.phase(phaseWords(incident.Phase, incident), duration(seconds))
}

/** Return an incident's badge: its outcome. Tone `warn`: a person must decide about a wait. */
export const standingOf = (incident: Incident): { word: string; tone: Tone } =>
  incident.Wait !== undefined && hasDecision(incident)
    ? { ...OUTCOMES[incident.Outcome], tone: 'warn' }
    : OUTCOMES[incident.Outcome]

const hasDecision = ({ Actions = [] }: Incident): boolean =>
  Actions.some(({ Urgency, InstanceId }) => Urgency !== 'Optional' && InstanceId === undefined)

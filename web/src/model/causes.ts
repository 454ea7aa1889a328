/** Words for the cause, the phase and the source of an incident. Pure. */
import { causeTitles, restoreSources, type Incident } from '../contract'
import { HAPPENINGS, PHASES } from '../words/causes'
import { words } from './format'

const TITLES: Readonly<Record<string, string>> = causeTitles
const SOURCES: Readonly<Record<string, string>> = restoreSources
const PHASE_WORDS: Readonly<Record<string, string>> = PHASES

/** Return the title of an incident's cause. A cause that only a newer server knows is shown by its own name. */
export const causeTitle = (cause: string): string => TITLES[cause] ?? words(cause)

/** Return what happened in a phase of an incident, for example "restarting ranks" if the nodes stayed the same. */
export const phaseWords = (phase: string, incident: Incident): string =>
  happeningIn(phase, incident)?.words ?? PHASE_WORDS[phase] ?? words(phase)

/** Return the CSS color of a phase. It depends on what happened, so that each color has one meaning. */
export const phaseColor = (phase: string, incident: Incident): string =>
  `var(--b-${happeningIn(phase, incident)?.color ?? phase})`

function happeningIn(phase: string, incident: Incident): (typeof HAPPENINGS)[keyof typeof HAPPENINGS] | undefined {
  if (phase === 'detect') return incident.Cause === 'grown' ? HAPPENINGS.stop : undefined
  if (phase === 'replace' && incident.Cause === 'grown') return HAPPENINGS.grow
  if (phase !== 'replace' || incident.ReplacementInstanceIds.length) return undefined
  if (!incident.InstanceIds.length) return HAPPENINGS.restart
  const { NodeCountBefore: before = 0, NodeCountAfter: after = before } = incident
  return incident.ClosedAt !== undefined && after < before ? HAPPENINGS.shrink : undefined
}

/** Return the name of a source of state; '' without a source. */
export const sourceWords = (source: Incident['RestoreSource'] = undefined): string =>
  source === undefined ? '' : (SOURCES[source] ?? source)

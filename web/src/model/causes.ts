/** Words for the cause, the phase and the source of an incident. Pure. */
import { causeTitles, restoreSources, type Incident } from '../contract'
import { PHASES } from '../words/causes'
import { words } from './format'

const TITLES: Readonly<Record<string, string>> = causeTitles
const SOURCES: Readonly<Record<string, string>> = restoreSources
const PHASE_WORDS: Readonly<Record<string, string>> = PHASES

/** Return what happened as a title. A cause that a newer server adds keeps its own name. */
export const causeTitle = (cause: string): string => TITLES[cause] ?? words(cause)

/** Return what happened as a clause. */
export function causeWords(cause: string): string {
  const title = causeTitle(cause)
  return title.startsWith('AWS') ? title : title.charAt(0).toLowerCase() + title.slice(1)
}

/** Return what Everstep does in a phase. */
export const phaseWords = (phase: string): string => PHASE_WORDS[phase] ?? words(phase)

/** Return the name of a source of state; '' without a source. */
export const sourceWords = (source: Incident['RestoreSource'] = undefined): string =>
  source === undefined ? '' : (SOURCES[source] ?? source)

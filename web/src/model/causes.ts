/** Words for the cause and the phase of an incident. Pure. */
import { CAUSES, PHASES } from '../words/causes'
import { words } from './format'

const CAUSE_WORDS: Readonly<Record<string, string>> = CAUSES
const PHASE_WORDS: Readonly<Record<string, string>> = PHASES

/** Return the words for a cause as a clause. A cause that a newer server adds keeps its own name. */
export function causeWords(cause: string): string {
  const clause = CAUSE_WORDS[cause] ?? words(cause)
  return clause.startsWith('AWS') ? clause : clause.charAt(0).toLowerCase() + clause.slice(1)
}

/** Return what Everstep does in a phase. */
export const phaseWords = (phase: string): string => PHASE_WORDS[phase] ?? words(phase)

/** What a job's rehearsals have shown, in words. Pure. */
import type { TrainingJob } from '../contract'
import { RESUME } from '../words/job'
import { count, duration, sentence } from './format'

type Rehearsed = Pick<Partial<TrainingJob>, 'RehearsalResult' | 'IsRehearsalPending'>

/** Return the line about a job's resume. Undefined before its first rehearsal, and for an older server. */
export function resumeWords({ RehearsalResult: result, IsRehearsalPending: isPending }: Rehearsed): string | undefined {
  if (result === undefined) return isPending ? RESUME.pending : undefined
  const texts = [result.Message, result.Advice].filter((text) => text !== undefined).map(sentence)
  const words = RESUME.of[result.Verdict](count(result.Step), duration(result.Seconds), result.Rank)
  return [words, ...texts, ...(isPending ? [RESUME.again] : [])].join(' ')
}

/** What a job's rehearsals have shown, in words. Pure. */
import type { TrainingJob } from '../contract'
import { RESUME } from '../words/job'
import { count, duration, sentence } from './format'

type Rehearsed = Pick<Partial<TrainingJob>, 'RehearsalResult' | 'IsRehearsalPending'>

/** Return the line about a job's resume. Undefined before its first rehearsal, and for an older server. */
export function resumeWords({ RehearsalResult: result, IsRehearsalPending: isPending }: Rehearsed): string | undefined {
  if (result === undefined) return isPending ? RESUME.pending : undefined
  const step = count(result.Step)
  const texts = [result.Message, result.Advice].filter((text) => text !== undefined).map(sentence)
  const words =
    result.Verdict === 'Proven'
      ? RESUME.proven(step, duration(result.Seconds))
      : [RESUME.wrong[result.Verdict](step, result.Rank), ...texts].join(' ')
  return isPending ? `${words} ${RESUME.again}` : words
}

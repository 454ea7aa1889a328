/** An incident in three statements: what failed, what was lost, what to do. Pure. */
import type { Incident, TrainingJob } from '../contract'
import { count, duration, headline, plural, sentence } from './format'
import { causeWords, phaseLengths, phaseWords, type Statement } from './verdict'

const FROM: Record<string, string> = { local: 'the memory of its own nodes', peer: 'the memory of other nodes', s3: 'a checkpoint in S3' }

export function story(incident: Incident, job: Partial<TrainingJob> | undefined, now: number): (Statement & { question: string })[] {
  const isOpen = incident.ClosedAt === undefined
  const lost = incident.InstanceIds ?? []
  const what: Statement & { question: string } = {
    question: 'What failed',
    tone: 'bad',
    title: sentence(causeWords(incident.Cause)).slice(0, -1),
    text: sentence((incident.Evidence ?? [])[0] ?? (lost.length ? `lost ${lost.join(', ')}` : 'no evidence was recorded')),
  }
  const steps = incident.LostSteps
  const source = incident.RestoreSource ? ` State came from ${FROM[incident.RestoreSource] ?? incident.RestoreSource}.` : ''
  const damage: Statement & { question: string } = {
    question: 'What was lost',
    tone: steps === undefined ? 'idle' : steps === 0 ? 'good' : 'warn',
    title: steps === undefined ? 'Not known yet' : steps === 0 ? 'No step' : plural(steps, 'step'),
    text: `${duration((incident.ClosedAt ?? now) - incident.FailedAt)} ${isOpen ? 'so far' : 'of training time'}${incident.FromStep === undefined ? '' : `; resumed from step ${count(incident.FromStep)}`}.${source}`,
  }
  const failed = job?.TrainingJobStatus === 'Failed'
  const current = phaseLengths(incident, now).at(-1)
  const next: Statement & { question: string } = isOpen
    ? {
        question: 'Is it over?',
        tone: 'busy',
        title: sentence(phaseWords(incident.Phase)).slice(0, -1),
        text: `${sentence(incident.Decision ?? '')} This phase has taken ${duration(current?.seconds ?? 0)}. The job’s page says whether you need to act.`.trim(),
      }
    : failed
      ? { question: 'Is it over?', tone: 'bad', title: 'The job has failed', text: headline(job?.FailureReason ?? job?.Reason ?? '') }
      : { question: 'Is it over?', tone: 'good', title: 'Yes', text: incident.GenerationAfter === undefined ? 'The job ended before another launch.' : 'Training is past where it was. Nothing is left to do.' }
  return [what, damage, next]
}

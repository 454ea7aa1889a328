/** An incident as answers to what somebody asks who has never seen it: what failed and when, why, what was done, what was lost, is it over. Pure. */
import type { Incident, TrainingJob } from '../contract'
import { ago, count, duration, headline, plural, sentence, utc } from './format'
import { causeWords, phaseLengths, phaseWords, type Statement } from './verdict'

const FROM: Record<string, string> = { local: 'the memory of its own nodes', peer: 'the memory of other nodes', s3: 'a checkpoint in S3' }
const MOST_EVIDENCE = 3

export type Answer = Statement & { question: string }

export function story(incident: Incident, job: Partial<TrainingJob> | undefined, now: number): Answer[] {
  const isOpen = incident.ClosedAt === undefined
  const lost = incident.InstanceIds ?? []
  const evidence = incident.Evidence ?? []
  const said = evidence.length ? evidence.slice(0, MOST_EVIDENCE).map(headline).join(' ') : sentence(lost.length ? `lost ${lost.join(', ')}` : 'no evidence was recorded')
  const more = evidence.length > MOST_EVIDENCE ? ` And ${count(evidence.length - MOST_EVIDENCE)} more.` : ''
  const found = Math.max(0, incident.OpenedAt - incident.FailedAt)
  const what: Answer = {
    question: 'What failed, when and why',
    tone: 'bad',
    title: sentence(causeWords(incident.Cause)).slice(0, -1),
    text: `${sentence(`${ago(incident.FailedAt, now)}, at ${utc(incident.FailedAt).slice(11)}`)} ${said}${more}${found >= 60 ? ` It was noticed only ${duration(found)} later.` : ''}`,
  }
  const came = incident.ReplacementInstanceIds ?? []
  const done: Answer = {
    question: isOpen ? 'What is being done' : 'What was done',
    tone: isOpen ? 'busy' : 'good',
    title: sentence(incident.Decision || 'nothing yet').slice(0, -1),
    text: `${sentence(incident.Reason ?? '')}${came.length ? ` In their place: ${came.join(', ')}.` : ''}`.trim(),
  }
  const steps = incident.LostSteps
  const isLast = !isOpen && incident.GenerationAfter === undefined
  const reached = incident.ReachedStep === undefined ? '' : `it had reached step ${count(incident.ReachedStep)} and `
  const where = incident.FromStep !== undefined ? `; resumed from step ${count(incident.FromStep)}` : isLast ? `; ${reached}was not launched again` : ''
  const source = incident.RestoreSource ? ` State came from ${FROM[incident.RestoreSource] ?? incident.RestoreSource}.` : ''
  const cost = incident.CostUsd === undefined || isOpen ? '' : ` It cost $${incident.CostUsd.toFixed(2)}.` // while it lasts, what it came to at its last phase
  const damage: Answer = {
    question: 'What was lost',
    tone: steps === undefined ? 'idle' : steps === 0 ? 'good' : 'warn',
    title: steps === undefined ? (isOpen ? 'Not known yet' : isLast ? 'What no checkpoint has' : 'Not known') : steps === 0 ? 'No step' : plural(steps, 'step'),
    text: `${duration((incident.ClosedAt ?? now) - incident.FailedAt)} ${isOpen ? 'so far' : 'of training time'}${where}.${source}${cost}`,
  }
  const failed = job?.TrainingJobStatus === 'Failed'
  const current = phaseLengths(incident, now).at(-1)
  const next: Answer = isOpen
    ? {
        question: 'Is it over?',
        tone: 'busy',
        title: `No: ${phaseWords(incident.Phase)}`,
        text: `This phase has taken ${duration(current?.seconds ?? 0)}. ${sentence(job?.Reason ?? '')} The job’s page says whether you need to act.`,
      }
    : failed
      ? { question: 'Is it over?', tone: 'bad', title: 'The job has failed', text: headline(job?.FailureReason ?? job?.Reason ?? '') }
      : {
          question: 'Is it over?',
          tone: 'good',
          title: 'Yes',
          text: `${sentence(`over ${ago(incident.ClosedAt!, now)}`)} ${isLast ? 'The job ended before another launch.' : 'Training is past where it was. Nothing is left to do.'}`,
        }
  return [what, done, damage, next]
}

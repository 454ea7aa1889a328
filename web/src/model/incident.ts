/** An incident as answers to what somebody asks who has never seen it: what failed and when, why, what was done, what was lost, is it over. Pure. */
import type { DescribeProtectionResponse, Incident, Node, TrainingJob } from '../contract'
import { lostBy } from './act'
import { ago, count, duration, headline, plural, sentence, utc } from './format'
import { waitsForAPerson } from './nodes'
import { leftInS3, leftUndone } from './standing'
import { causeWords, phaseLengths, phaseWords, type Statement } from './verdict'

const FROM: Record<string, string> = { local: 'the memory of its own nodes', peer: 'the memory of other nodes', s3: 'a checkpoint in S3' }
const MOST_EVIDENCE = 3
const ENDS: Record<string, string> = {
  Completed: 'The job was done with it.',
  Stopped: 'The job was stopped with it.',
  Paused: 'The job was paused; what was still to be made up for is done when it is resumed.',
}

export type Answer = Statement & { question: string }

/** What else is known besides an incident and its job. */
export interface Besides {
  /** Of the fleet. */
  nodes?: readonly Pick<Node, 'NodeId' | 'NodeStatus' | 'Hold'>[]
  /** Of the job: what is kept in S3. */
  protection?: Partial<DescribeProtectionResponse>
}

/** Moments that one pass of the control plane stores may differ by what rounding does. */
const SAME_MOMENT_SECONDS = 1

/** What ended an incident before training had made up for it: the job's own end, or a pause. */
function cutShortBy(incident: Incident, job: Partial<TrainingJob> | undefined): string | undefined {
  const closed = incident.ClosedAt
  if (closed === undefined || job === undefined || (job.RunId !== undefined && job.RunId !== incident.RunId)) return undefined
  const isThen = (at?: number) => at !== undefined && Math.abs(at - closed) <= SAME_MOMENT_SECONDS
  if (isThen(job.TrainingEndTime)) return job.TrainingJobStatus
  return job.SecondaryStatusTransitions?.some((each) => each.State === 'queued' && isThen(each.StartTime)) ? 'Paused' : undefined
}

/**
 * Tell an incident.
 *
 * `job`: of the incident, where it is known.
 */
export function story(incident: Incident, job: Partial<TrainingJob> | undefined, now: number, { nodes = [], protection }: Besides = {}): Answer[] {
  const isOpen = incident.ClosedAt === undefined
  const end = cutShortBy(incident, job)
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
  const replaced = came.length ? ` ${lost.length ? 'In their place' : 'Other nodes were tried'}: ${came.join(', ')}.` : ''
  const isLeft = isOpen && job !== undefined && leftUndone(job) !== undefined
  const done: Answer = isLeft
    ? {
        question: 'What is being done',
        tone: 'bad',
        title: 'Nothing: automation is off',
        text: `${sentence(`${job.TakenOverBy ?? 'a person'} has taken the job over`)} Decided before: ${sentence(incident.Decision || 'nothing')}${replaced}`,
      }
    : {
        question: isOpen ? 'What is being done' : 'What was done',
        tone: isOpen ? 'busy' : end === 'Failed' ? 'bad' : 'good',
        title: sentence(incident.Decision || 'nothing yet').slice(0, -1),
        text: `${sentence(incident.Reason ?? '')}${replaced}`.trim(),
      }
  const steps = incident.LostSteps
  const isLast = !isOpen && incident.GenerationAfter === undefined
  const reached = incident.ReachedStep === undefined ? '' : `it had reached step ${count(incident.ReachedStep)} and `
  const where = incident.FromStep !== undefined ? `; resumed from step ${count(incident.FromStep)}` : isLast ? `; ${reached}was not launched again` : ''
  const source = incident.RestoreSource ? ` State came from ${FROM[incident.RestoreSource] ?? incident.RestoreSource}.` : ''
  const cost = incident.CostUsd === undefined ? '' : ` It ${isOpen ? 'has cost' : 'cost'} $${incident.CostUsd.toFixed(2)}${isOpen ? ' so far' : ''}.`
  const took = `${duration((incident.ClosedAt ?? now) - incident.FailedAt)} ${isOpen ? 'so far' : 'of training time'}`
  const left = end === 'Failed' || end === 'Stopped' ? leftInS3(job!, protection) : undefined
  const damage: Answer = left
    ? { question: 'What was lost', ...left, text: `${left.text} ${sentence(took)}${cost}` }
    : {
        question: 'What was lost',
        tone: steps === undefined ? 'idle' : steps === 0 ? 'good' : 'warn',
        title: steps === undefined ? (isOpen ? 'Not known yet' : isLast ? 'What no checkpoint has' : 'Not known') : steps === 0 ? 'No step' : plural(steps, 'step'),
        text: `${took}${where}.${source}${cost}`,
      }
  const current = phaseLengths(incident, now).at(-1)
  const held = lostBy([incident], nodes).filter(waitsForAPerson).map((node) => node.NodeId)
  const kept = held.length ? ` ${held.join(', ')} ${held.length === 1 ? 'is' : 'are'} held, and ${held.length === 1 ? 'waits' : 'wait'} for a person.` : ''
  const next: Answer = isOpen
    ? {
        question: 'Is it over?',
        tone: 'busy',
        title: `No: ${phaseWords(incident.Phase)}`,
        text: `This phase has taken ${duration(current?.seconds ?? 0)}. ${sentence(job?.Reason ?? '')} The job’s page says whether you need to act.`,
      }
    : end === 'Failed'
      ? { question: 'Is it over?', tone: 'bad', title: 'Yes: the job has failed', text: `${headline(job?.FailureReason ?? job?.Reason ?? '')}${kept}` }
      : {
          question: 'Is it over?',
          tone: kept ? 'warn' : 'good',
          title: kept ? 'Yes, but for a held node' : 'Yes',
          text: `${sentence(`over ${ago(incident.ClosedAt!, now)}`)} ${ENDS[end ?? ''] ?? (isLast ? 'The job ended before another launch.' : `Training is past where it was.${kept ? '' : ' Nothing is left to do.'}`)}${kept}`,
        }
  return [what, done, damage, next]
}

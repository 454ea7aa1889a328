/** An incident as answers to what somebody asks who has never seen it: what failed and when, why, what was done, what was lost, is it over. Pure. */
import type { DescribeProtectionResponse, Incident, Node, TrainingJob } from '../contract'
import { lostBy, type Act } from './act'
import { ago, count, duration, headline, plural, sentence, utc } from './format'
import { waitsForAPerson } from './nodes'
import { cutShortBy, leftInS3, leftUndone } from './standing'
import { phaseLengths } from './figures'
import { causeWords, phaseWords, reasonWords, type Statement } from './verdict'

const FROM: Record<string, string> = { local: 'the memory of its own nodes', peer: 'the memory of other nodes', parity: 'parity in the memory of other nodes', s3: 'a checkpoint in S3' }
const MOST_EVIDENCE = 3
/** Words of `with_absence` (control_plane/core/incidents.py). */
export const NOBODY_WAS_THERE = 'no control plane was running'
const ENDS: Record<string, string> = {
  Completed: 'The job was done with it.',
  Stopped: 'The job was stopped with it.',
  Paused: 'The job was paused; what was still to be made up for is done when it is resumed.',
}

export type Answer = Statement & { question: string }

/** What else is known besides an incident and its job. */
export interface Besides {
  /** Of the fleet: those that have not ended; absent while they are not known. */
  nodes?: readonly Pick<Node, 'NodeId' | 'NodeStatus' | 'Hold'>[]
  /** Of the job: what is kept in S3. */
  protection?: Partial<DescribeProtectionResponse>
  /** Of the job, where it is told beside the story. */
  act?: Pick<Act, 'needed'>
}

/** How a Python script ended, by the last line of a failure that is told with its traceback. */
const thrownIn = (reason: string): string | undefined => /^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Iteration)(?:: .*)?)$/.exec(reason.trim().split('\n').slice(1).at(-1)?.trim() ?? '')?.[1]

/** Several facts of which one ended the job: that one last, and named so. */
function inOrder(facts: string[], isThrown: boolean): string[] {
  const last = isThrown ? facts.findLastIndex((each) => /\bended: error\b/.test(each)) : -1
  if (last < 0 || facts.length < 2) return facts
  return [`Before: ${facts.filter((_, index) => index !== last).join(' ')}`, `Last, and decisive: ${facts[last]}`]
}

/** What became of nodes that were lost, where no person has to decide it. */
function fates(lost: readonly string[], nodes: Besides['nodes']): string {
  if (nodes === undefined) return ''
  const told = lost.map((id) => {
    const node = nodes.find((each) => each.NodeId === id)
    if (node === undefined) return `${id} has ended.`
    if (node.NodeStatus === 'held' && node.Hold === 'unreachable') return `${id} is held, not ended: it works for nobody, and is used again once it answers.`
    return node.NodeStatus === 'spare' || node.NodeStatus === 'assigned' ? `${id} is in use again.` : ''
  })
  return told.filter(Boolean).map((each) => ` ${each}`).join('')
}

/**
 * Tell an incident.
 *
 * `job`: of the incident, where it is known.
 */
export function story(incident: Incident, job: Partial<TrainingJob> | undefined, now: number, { nodes, protection, act }: Besides = {}): Answer[] {
  const isOpen = incident.ClosedAt === undefined
  const end = cutShortBy(incident, job)
  const lost = incident.InstanceIds ?? []
  const evidence = incident.Evidence ?? []
  const thrown = end === 'Failed' && incident.Cause === 'rank_exit' ? thrownIn(job!.FailureReason ?? job!.Reason ?? '') : undefined
  const said = evidence.length ? inOrder(evidence.slice(0, MOST_EVIDENCE).map(headline), thrown !== undefined).join(' ') : sentence(lost.length ? `lost ${lost.join(', ')}` : 'no evidence was recorded')
  const more = evidence.length > MOST_EVIDENCE ? ` And ${count(evidence.length - MOST_EVIDENCE)} more.` : ''
  const found = Math.max(0, incident.OpenedAt - incident.FailedAt)
  const what: Answer = {
    question: 'What failed, when and why',
    tone: 'bad',
    title: thrown ? `Your script ended with ${thrown}` : sentence(causeWords(incident.Cause)).slice(0, -1),
    text: `${sentence(`${ago(incident.FailedAt, now)}, at ${utc(incident.FailedAt).slice(11)}`)} ${said}${more}${found >= 60 ? ` It was noticed only ${duration(found)} later.` : ''}`,
  }
  const came = incident.ReplacementInstanceIds ?? []
  const replaced = came.length ? ` ${lost.length ? 'In their place' : 'Other nodes were tried'}: ${came.join(', ')}.` : ''
  const isGivenUp = end === 'Failed' && /give the job up$/.test(incident.Decision ?? '') // what the last launch resumed from is of no use to anybody then
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
        text: `${isGivenUp ? '' : sentence(incident.Reason ?? '')}${replaced}${fates(lost, nodes)}`.trim(),
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
  const held = lostBy([incident], nodes ?? []).filter(waitsForAPerson).map((node) => node.NodeId)
  const kept = held.length ? ` ${held.join(', ')} ${held.length === 1 ? 'is' : 'are'} held, and ${held.length === 1 ? 'waits' : 'wait'} for a person.` : ''
  const next: Answer = isOpen
    ? {
        question: 'Is it over?',
        tone: 'busy',
        title: `No: ${phaseWords(incident.Phase)}`,
        text: `This phase has taken ${duration(current?.seconds ?? 0)}. ${job?.Reason ? `${reasonWords(job.Reason, now).text} ` : ''}${act ? (act.needed ? 'You need to act.' : 'You need not act.') : 'The job’s page says whether you need to act.'}`,
      }
    : end === 'Failed'
      ? { question: 'Is it over?', tone: 'bad', title: 'Yes: the job has failed', text: `${headline(job?.FailureReason ?? job?.Reason ?? '')}${kept}` }
      : {
          question: 'Is it over?',
          tone: kept ? 'warn' : 'good',
          title: kept ? 'Yes, but for a held node' : 'Yes',
          text: `${sentence(`over ${ago(incident.ClosedAt!, now)}`)}${evidence.some((each) => each.startsWith(NOBODY_WAS_THERE)) ? ' It took longer because no control plane was running.' : ''} ${ENDS[end ?? ''] ?? (isLast ? 'The job ended before another launch.' : `Training is past where it was.${kept ? '' : ' Nothing is left to do.'}`)}${kept}`,
        }
  return [what, done, damage, next]
}

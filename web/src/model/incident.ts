/** An incident as four answers: what failed, what Everstep did, what was lost, and its status. Pure. */
import type { DescribeProtectionResponse, Incident, Node, TrainingJob } from '../contract'
import { STATE } from '../words/job'
import { STORY } from '../words/jobTabs'
import { lostBy, type Act } from './act'
import { capacityWait, capacityWords } from './capacity'
import { causeWords, phaseWords } from './causes'
import type { Statement } from './facts'
import { phaseLengths } from './figures'
import { ago, count, dollars, duration, headline, plural, sentence, utc } from './format'
import { waitsForAPerson } from './nodes'
import { cutShortBy, reachedStep, unrecoveredReason, type Tone } from './standing'

const MOST_EVIDENCE = 3
/** An incident that was detected later than this after the failure says so. */
const LATE_DETECTION_SECONDS = 60
/** Words of `with_absence` (control_plane/core/incidents.py). */
export const NO_CONTROL_PLANE = 'no control plane was running'

const FROM: Readonly<Record<string, string>> = STORY.from
const ENDS: Readonly<Record<string, string>> = STORY.ends
const QUESTIONS = STORY.questions

export type Answer = Statement & { question: string }

/** Facts besides the incident and its job. */
export interface Besides {
  /** Nodes of the fleet that have not ended. Absent while they are unknown. */
  nodes?: readonly Pick<Node, 'NodeId' | 'NodeStatus' | 'Hold'>[]
  /** The job's protection. */
  protection?: Partial<DescribeProtectionResponse>
  /** The job's act, on a page that shows the job's verdict, with its reason, beside the incident. */
  act?: Pick<Act, 'needed'>
}

/** Return the four answers. `job`: the incident's job, if it is known. */
export function story(incident: Incident, job: Partial<TrainingJob> | undefined, now: number, besides: Besides = {}): Answer[] {
  const end = cutShortBy(incident, job)
  return [
    whatFailed(incident, job, now, end),
    whatWasDone(incident, job, end, besides.nodes),
    whatWasLost(incident, job, now, end, besides.protection),
    status(incident, job, now, end, besides),
  ]
}

const joined = (...sentences: (string | undefined)[]): string => sentences.filter(Boolean).join(' ')

function whatFailed(incident: Incident, job: Partial<TrainingJob> | undefined, now: number, end?: string): Answer {
  const evidence = incident.Evidence ?? []
  const error = end === 'Failed' && incident.Cause === 'rank_exit' ? pythonError(job?.FailureReason ?? job?.Reason ?? '') : undefined
  const lost = incident.InstanceIds ?? []
  const facts = evidence.length
    ? inOrder(evidence.slice(0, MOST_EVIDENCE).map(headline), error !== undefined).join(' ')
    : sentence(lost.length ? STORY.lostNodes(lost.join(', ')) : STORY.noEvidence)
  const more = evidence.length - MOST_EVIDENCE
  const late = Math.max(0, incident.OpenedAt - incident.FailedAt)
  return {
    question: QUESTIONS.what,
    tone: 'bad',
    title: error ? STORY.script(error) : title(causeWords(incident.Cause)),
    text: joined(
      sentence(STORY.at(ago(incident.FailedAt, now), utc(incident.FailedAt).slice(11))), facts,
      more > 0 ? STORY.more(count(more)) : '', late >= LATE_DETECTION_SECONDS ? STORY.detectedLate(duration(late)) : '',
    ),
  }
}

const title = (text: string): string => sentence(text).replace(/\.$/, '')

/** Return the exception with which a Python script ended: the last line of a failure reason with a traceback. */
function pythonError(reason: string): string | undefined {
  const last = reason.trim().split('\n').slice(1).at(-1)?.trim() ?? ''
  return /^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Iteration)(?:: .*)?)$/.exec(last)?.[1]
}

/** Put the fact about the script's error last. Other crashes before it are no cause. */
function inOrder(facts: string[], hasError: boolean): string[] {
  const last = hasError ? facts.findLastIndex((each) => /\bended: error\b/.test(each)) : -1
  if (last < 0 || facts.length < 2) return facts
  return [STORY.before(facts.filter((_, index) => index !== last).join(' ')), STORY.decisive(facts[last]!)]
}

function whatWasDone(incident: Incident, job: Partial<TrainingJob> | undefined, end: string | undefined, nodes: Besides['nodes']): Answer {
  const isOpen = incident.ClosedAt === undefined
  const lost = incident.InstanceIds ?? []
  const others = (incident.ReplacementInstanceIds ?? []).join(', ')
  const replaced = others && (lost.length ? STORY.replacedBy(others) : STORY.tried(others))
  if (isOpen && job !== undefined && unrecoveredReason(job) !== undefined) {
    const decided = STORY.decidedBefore(sentence(incident.Decision || 'nothing'))
    const person = sentence(STORY.takenOver(job.TakenOverBy ?? STATE.person))
    return { question: QUESTIONS.doing, tone: 'bad', title: STORY.automationOff, text: joined(person, decided, replaced) }
  }
  /** The source of the last launch does not matter after the job has failed. */
  const hasGivenUp = end === 'Failed' && /give the job up$/.test(incident.Decision ?? '')
  return {
    question: isOpen ? QUESTIONS.doing : QUESTIONS.did,
    tone: isOpen ? 'busy' : end === 'Failed' ? 'bad' : 'good',
    title: title(incident.Decision || STORY.noDecision),
    text: joined(hasGivenUp ? '' : sentence(incident.Reason ?? ''), replaced, ...fates(lost, nodes)),
  }
}

/** What became of lost nodes about which no person must decide. */
function fates(lost: readonly string[], nodes: Besides['nodes']): string[] {
  if (nodes === undefined) return []
  return lost.map((id) => {
    const node = nodes.find((each) => each.NodeId === id)
    if (node === undefined) return STORY.ended(id)
    if (node.NodeStatus === 'held' && node.Hold === 'unreachable') return STORY.unreachable(id)
    return node.NodeStatus === 'spare' || node.NodeStatus === 'assigned' ? STORY.reused(id) : ''
  })
}

function whatWasLost(
  incident: Incident, job: Partial<TrainingJob> | undefined, now: number, end?: string, protection?: Besides['protection'],
): Answer {
  const isOpen = incident.ClosedAt === undefined
  const steps = incident.LostSteps
  const isLast = !isOpen && incident.GenerationAfter === undefined
  const took = STORY.time(duration((incident.ClosedAt ?? now) - incident.FailedAt), isOpen)
  const cost = incident.CostUsd === undefined ? '' : STORY.cost(dollars(incident.CostUsd), isOpen)
  const atEnd = end === 'Failed' || end === 'Stopped' ? lossAtEnd(job!, protection) : undefined
  if (atEnd) return { question: QUESTIONS.lost, ...atEnd, text: joined(atEnd.text, sentence(took), cost) }
  const reached = incident.ReachedStep
  const where =
    incident.FromStep !== undefined ? STORY.resumed(count(incident.FromStep))
    : !isLast ? ''
    : reached === undefined ? STORY.notRelaunched : STORY.relaunchReached(count(reached))
  const source = incident.RestoreSource ? STORY.restored(FROM[incident.RestoreSource] ?? incident.RestoreSource) : ''
  const unknown = isOpen ? STORY.unknownYet : isLast ? STORY.uncheckpointed : STORY.unknown
  return {
    question: QUESTIONS.lost,
    tone: steps === undefined ? 'idle' : steps === 0 ? 'good' : 'warn',
    title: steps === undefined ? unknown : steps === 0 ? STORY.noStep : plural(steps, 'step'),
    text: joined(sentence(where ? `${took}; ${where}` : took), source, cost),
  }
}

interface Loss {
  tone: Tone
  title: string
  text: string
}

/** Return the steps that an ended job lost, against its newest checkpoint. undefined: the checkpoint is unknown. */
function lossAtEnd(
  job: Pick<Partial<TrainingJob>, 'Boundary' | 'MaxBoundary'>, protection?: Partial<DescribeProtectionResponse>,
): Loss | undefined {
  if (protection === undefined) return undefined
  const reached = reachedStep(job)
  const kept = protection.LastCheckpoint?.Step
  const lost = reached - (kept ?? 0)
  if (reached <= 0) return { tone: 'good', title: STORY.noStep, text: STORY.madeNone }
  if (lost <= 0) return { tone: 'good', title: STORY.noStep, text: STORY.keptAll(count(reached)) }
  const steps = plural(lost, 'step')
  if (kept === undefined) return { tone: 'bad', title: lost === 1 ? steps : STORY.allOf(steps), text: STORY.keptNone(count(reached)) }
  return { tone: 'bad', title: steps, text: STORY.kept(count(reached), count(kept)) }
}

function status(incident: Incident, job: Partial<TrainingJob> | undefined, now: number, end: string | undefined, besides: Besides): Answer {
  const question = QUESTIONS.now
  const held = lostBy([incident], besides.nodes ?? []).filter(waitsForAPerson).map((node) => node.NodeId)
  const heldText = held.length ? STORY.held(held.join(', '), held.length === 1) : ''
  if (incident.ClosedAt === undefined) {
    const reason = besides.act === undefined ? (job?.Reason ?? '') : ''
    const wait = capacityWait(reason, now)
    const act = besides.act === undefined ? STORY.seeJob : besides.act.needed ? STORY.actNow : STORY.noAct
    const length = phaseLengths(incident, now).at(-1)?.seconds ?? 0
    const text = joined(STORY.phaseTime(duration(length)), wait ? capacityWords(wait) : sentence(reason), act)
    return { question, tone: 'busy', title: STORY.open(phaseWords(incident.Phase)), text }
  }
  if (end === 'Failed') {
    const text = joined(headline(job?.FailureReason ?? job?.Reason ?? ''), heldText)
    return { question, tone: 'bad', title: STORY.closedFailed, text }
  }
  const isLast = incident.GenerationAfter === undefined
  const when = ago(incident.ClosedAt, now)
  const wasAbsent = (incident.Evidence ?? []).some((each) => each.startsWith(NO_CONTROL_PLANE))
  return {
    question,
    tone: heldText ? 'warn' : 'good',
    title: heldText ? STORY.closedHeld : STORY.closed,
    text: joined(
      end || isLast ? STORY.endedAgo(when) : STORY.recovered(when), wasAbsent ? STORY.absence : '',
      ENDS[end ?? ''] ?? (isLast ? STORY.noOtherLaunch : STORY.passed), heldText,
    ),
  }
}

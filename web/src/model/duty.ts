/** What a person can do, and how urgent it is. No other module decides whether a person must act. Pure. */
import type { Incident, IncidentAction, Node, TrainingJob } from '../contract'
import { DUTIES, DUTY, type Urgency } from '../words/duty'
import { count, plural } from './format'
import { isOver, type Tone } from './standing'

export type { Urgency }

/** One thing that a person can do. */
export interface Step {
  urgency: IncidentAction['Urgency']
  text: string
  /** Commands with all names filled in. The person runs the first command, and then chooses one of the others. */
  commands: readonly string[]
  /** The held node that the step is about. */
  nodeId?: string
  /** Whether Everstep recommends the step instead of waiting. */
  isRecommended?: boolean
  /** RunId and new MinNodeCount of a job, for a button that lets the job continue on fewer nodes. */
  shrink?: { runId: string; nodes: number }
  /** A page on which the person can take the step. */
  link?: { to: string; label: string }
}

const ORDER: readonly Urgency[] = ['Now', 'Later', 'Optional', 'None']

/** Return the urgency of the most urgent step. None: there is nothing to do. */
export const urgencyOf = (steps: readonly Step[]): Urgency =>
  ORDER.find((urgency) => urgency === 'None' || steps.some((step) => step.urgency === urgency))!

/** Whether a person must decide something. Phones show such steps first. */
export const isPressing = (urgency: Urgency): boolean => urgency === 'Now' || urgency === 'Later'

/** Return the steps, the most urgent first. */
export const urgentFirst = (steps: readonly Step[]): Step[] =>
  steps.toSorted((a, b) => ORDER.indexOf(a.urgency) - ORDER.indexOf(b.urgency))

/**
 * Return the step that the verdict (sentence at the top) of an incident's page states. Undefined if it states none.
 *
 * The card of steps then shows only the rest of this step's text.
 */
export function statedStep(steps: readonly Step[], isWaiting: boolean): Step | undefined {
  const urgency = urgencyOf(steps)
  const equal = steps.filter((step) => step.urgency === urgency)
  const choice = equal.find((step) => step.nodeId === undefined)
  if (isWaiting && urgency === 'Later' && choice) return choice
  if (isWaiting && !isPressing(urgency)) return undefined
  return urgency === 'Now' || (urgency === 'Optional' ? steps : equal).length === 1 ? equal[0] : undefined
}

/** Return the text of a step without its first sentence. */
export const restOf = ({ text }: Pick<Step, 'text'>): string =>
  text
    .split(/(?<=\.) (?=[A-Z])/)
    .slice(1)
    .join(' ')

/** Return the sentence that says whether a person must act, for the top of a page (the verdict). */
export function dutySentence(steps: readonly Step[]): string {
  const urgency = urgencyOf(steps)
  const stated = statedStep(steps, false)
  if (stated) return { Now: DUTY.now, Later: DUTY.later, Optional: DUTY.optional }[stated.urgency](briefOf(stated))
  const nodes = steps.filter((step) => step.urgency === 'Later' && step.nodeId !== undefined)
  return urgency === 'Later' && nodes.length ? DUTY.nodes(plural(nodes.length, 'node')) : DUTIES[urgency].lead
}

const uncapitalized = (text: string): string => text.charAt(0).toLowerCase() + text.slice(1)

/** Return the steps that the API names for an incident. `runId`: RunId of the incident's job. */
export const stepsOf = (actions: readonly IncidentAction[] = [], runId?: string): Step[] =>
  actions.map(({ Urgency: urgency, Description: text, Command, FurtherCommands, InstanceId: nodeId, ...rest }) => ({
    urgency,
    text,
    commands: [Command, ...(FurtherCommands ?? [])],
    ...(nodeId === undefined ? {} : { nodeId }),
    ...(rest.IsRecommended ? { isRecommended: true } : {}),
    ...(rest.MinNodeCount === undefined || runId === undefined ? {} : { shrink: { runId, nodes: rest.MinNodeCount } }),
  }))

/** Return the steps for nodes that a person must release or terminate. Everstep itself releases other held nodes. */
export const nodeSteps = (nodes: readonly Pick<Node, 'NodeId' | 'HoldAdvice'>[]): Step[] =>
  nodes.flatMap(({ NodeId: nodeId, HoldAdvice: advice }): Step[] =>
    advice === undefined
      ? []
      : [
          {
            urgency: 'Later',
            text: advice.Description,
            nodeId,
            commands: [advice.Command, ...(advice.FurtherCommands ?? [])],
          },
        ],
  )

type Ended = Partial<Pick<TrainingJob, 'RunId' | 'TrainingJobStatus'>>

/** Return the steps of a failed job with a link to the form that submits it again, from its newest checkpoint. */
export function withResubmission(steps: readonly Step[], job: Ended, checkpointStep: number | undefined): Step[] {
  if (!isOver(job) || job.RunId === undefined) return [...steps]
  const checkpoint = checkpointStep === undefined ? '' : `&checkpoint=${checkpointStep}`
  const label = DUTY.resubmit(checkpointStep === undefined ? undefined : count(checkpointStep))
  const link = { to: `/submit?from=${encodeURIComponent(job.RunId)}${checkpoint}`, label }
  return steps.map((step) => (step.urgency === 'Now' ? { ...step, link } : step))
}

/** Return what a step does, without its reason: "pause the job". */
export const briefOf = ({ text }: Pick<Step, 'text'>): string => uncapitalized(text.split(/[:,.]/)[0]!)

/** Return the sentence at the top of an incident's page (its verdict): whether a person must act. */
export function incidentLine(
  { ClosedAt, Headline, Wait }: Pick<Incident, 'ClosedAt' | 'Headline' | 'Wait'>,
  steps: readonly Step[],
): { tone: Tone; lead: string } {
  const { tone } = DUTIES[urgencyOf(steps)]
  if (Wait !== undefined && urgencyOf(steps) !== 'Now') {
    const choice = statedStep(steps, true)
    if (choice && choice.nodeId === undefined) return { tone: 'warn', lead: decision(choice) }
    if (!isPressing(urgencyOf(steps))) return { tone: 'busy', lead: DUTY.notYet }
  }
  const { nodeId = '' } = statedStep(steps, false) ?? {}
  const isInTitle = nodeId !== '' && Headline.includes(nodeId)
  const lead = isInTitle ? dutySentence(steps).replace(`node ${nodeId}`, DUTY.thisNode) : dutySentence(steps)
  if (tone === 'bad') return { tone, lead }
  // Do not use the tone `warn` (amber), which is for decisions that cannot wait.
  const closed = tone === 'good' ? tone : 'idle'
  return { tone: ClosedAt === undefined ? 'busy' : closed, lead }
}

/** Return the sentence that asks a person to decide whether to continue a long wait or to take the step `choice`. */
export const decision = (choice: Step): string => DUTY.decideWait(briefOf(choice), choice.isRecommended ?? false)

/** The words with which all pages state whether a person must act. */
import type { IncidentAction } from '../contract'
import type { Tone } from '../model/standing'

export type Urgency = IncidentAction['Urgency'] | 'None'

/** Texts by urgency. `word`: badge of a step. `title`: title of a card with steps. `lead`: sentence of a verdict. */
export const DUTIES: Readonly<Record<Urgency, { word: string; title: string; tone: Tone; lead: string }>> = {
  Now: { word: 'Act now', title: 'Act now', tone: 'bad', lead: 'Act now.' },
  Later: { word: 'Not urgent', title: 'Not urgent', tone: 'warn', lead: 'Not urgent, but something waits for you.' },
  Optional: {
    word: 'Optional',
    title: 'You need not act',
    tone: 'idle',
    lead: 'You need not act; there are optional steps.',
  },
  None: { word: 'Nothing to do', title: 'Nothing to do', tone: 'good', lead: 'Nothing to do.' },
}

export const DUTY = {
  title: 'What to do',
  none: 'Nothing. No node and no job waits for you.',
  now: (what: string) => `Act now: ${what}.`,
  later: (step: string) => `Not urgent: ${step}.`,
  nodes: (nodes: string) => `Not urgent: decide about ${nodes} that are out of use.`,
  optional: (step: string) => `Optional: ${step}.`,
  decide: { Terminate: 'Terminate node…', Release: 'Release node…', Inspect: 'Terminate or release node…' },
  showNode: 'Show the node',
  details: 'Details',
  commands: (commands: number) => (commands === 1 ? 'As a command' : 'As commands'),
  resubmit: (step?: string) => `Then submit again from ${step === undefined ? 'the beginning' : `step ${step}`}…`,
  recommended: 'Recommended',
  /** Title of a card with a decision of a person. */
  decision: 'Decide',
  decideWait: (choice: string, isRecommended: boolean) =>
    isRecommended ? `Recommended now: ${choice}.` : `Decide now: wait (recommended), or ${choice}.`,
  notYet: 'Nothing to do yet.',
  thisNode: 'this node',
  shrink: (nodes: number) => `Continue on ${nodes} ${nodes === 1 ? 'node' : 'nodes'}`,
  outage: {
    lead: 'The control plane does not answer.',
    text: 'Act now: check the control plane. Training continues, but a recovery waits for it. This page shows old data.',
  },
} as const

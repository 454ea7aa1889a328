/** Every text of the pages of incidents. The verdict and the actions of an incident come from the server. */
import type { Incident, SimilarIncident } from '../contract'
import { count, plural } from '../model/format'
import type { Tone } from '../model/standing'

type Outcome = NonNullable<Incident['Outcome']>
export const OUTCOMES: Readonly<Record<Outcome, { word: string; tone: Tone }>> = {
  Open: { word: 'Recovering', tone: 'busy' },
  Recovered: { word: 'Recovered', tone: 'good' },
  JobPaused: { word: 'Job paused', tone: 'idle' },
  JobCompleted: { word: 'Job completed', tone: 'good' },
  JobFailed: { word: 'Job failed', tone: 'bad' },
  JobStopped: { word: 'Job stopped', tone: 'idle' },
}

const LIKENESS: Readonly<Record<SimilarIncident['Likeness'][number], string>> = {
  Instance: 'same instance',
  InstanceType: 'same instance type',
  Fleet: 'same fleet',
}

export const INCIDENT = {
  crumb: 'Incidents',
  acknowledge: 'Acknowledge',
  acknowledgeNote: 'Marks the incident as seen, and changes nothing else.',
  wait: {
    missing: (count: number, type: string, zone: string) =>
      `${count} ${type || (count === 1 ? 'node' : 'nodes')}${zone && ` in ${zone}`}`,
    due: 'now',
    recommended: 'Wait for the next attempt (recommended).',
    undecided: 'If nobody decides, Everstep tries again every 15 min.',
    other: (choices: number, isDecision: boolean) =>
      isDecision ? `Other choices (${count(choices)})` : `Optional (${count(choices)})`,
  },
  acknowledged: 'Acknowledged by',
  export: 'Export post-mortem',
  runbook: 'Runbook',
  happened: {
    title: 'What happened',
    what: 'What failed',
    when: 'When',
    why: 'Why',
    done: 'Response',
    now: 'Now',
    lost: (isOpen: boolean) => (isOpen ? 'Lost so far' : 'Lost'),
    details: (pieces: number) => `Details (${count(pieces)})`,
    noneLost: 'steps',
    recomputed: (steps: number) => `${steps === 1 ? 'step' : 'steps'} recomputed`,
    unsaved: (steps: number) => (steps === 1 ? 'step' : 'steps'),
    unsavedReason: (kept: number) =>
      kept === 0
        ? 'All steps are lost: no checkpoint in S3 has them.'
        : `All steps after step ${count(kept)} are lost: no checkpoint in S3 has them.`,
    downtime: 'downtime',
    costs: 'for nodes that did not train',
  },
  phase: (phase: string, time: string) => `Everstep is ${phase}, for ${time} so far.`,
  people: {
    title: 'Owner and notes',
    owner: 'Owner',
    nobody: 'Nobody',
    take: 'Assign to me',
    change: 'Change',
    save: 'Save',
    clear: 'Remove',
  },
  phases: { title: 'Recovery', now: 'so far' },
  timeline: {
    title: 'Timeline',
    log: 'Open the log at this moment',
    lines: (lines: number) => `The last ${plural(lines, 'line')} before the failure`,
    stacks: 'Stacks of the ranks',
    none: 'The log has no lines before the failure.',
    note: (author: string) => `Note of ${author}`,
  },
  facts: {
    title: 'Figures',
    failed: 'Failed',
    detected: 'Detected',
    closed: 'Closed',
    open: 'open',
    launch: 'Launch',
    reached: 'Step before the failure',
    resumed: 'Resumed from step',
    recomputed: 'Recomputed steps',
    unsaved: 'Lost steps',
    sources: 'Restored from',
    nowhere: 'no restore was needed',
    faulted: 'Failure on',
    noNode: 'no particular node',
    lost: 'Lost nodes',
    replaced: 'Replacements',
    none: 'none',
    cost: 'Cost of idle nodes',
    nodes: 'Nodes',
    project: 'Project',
  },
  similar: {
    title: 'Similar incidents',
    none: 'The project has no other incident of this cause.',
    columns: {
      incident: 'Incident',
      job: 'Job',
      failed: 'Opened',
      shares: 'In common',
      outcome: 'Outcome',
      steps: 'Recomputed steps',
    },
    shares: (likeness: readonly SimilarIncident['Likeness'][number][]) =>
      likeness.length ? likeness.map((each) => LIKENESS[each]).join(', ') : 'same cause',
  },
} as const

export const INCIDENTS = {
  title: 'Incidents',
  verdict: {
    open: (open: number) => `${plural(open, 'incident')} ${open === 1 ? 'is' : 'are'} open.`,
    unseen: (unseen: number, open: number) =>
      `Nobody has acknowledged ${open === 1 ? 'it' : unseen === open ? 'them' : `${count(unseen)} of them`}.`,
    calm: 'No incident is open.',
  },
  empty: {
    title: 'No incident yet',
    text: 'An incident is a failure that ends a launch of a job, together with its recovery.',
  },
  filters: {
    text: 'Filter incidents',
    placeholder: 'Job, cause, node or id  ( / )',
    state: 'State',
    states: { all: 'All', open: 'Open', closed: 'Closed' },
    cause: 'Cause',
    everyCause: 'All causes',
    owner: 'Owner',
    everyOwner: 'All owners',
    noOwner: 'Without an owner',
    project: 'Project',
    everyProject: 'All projects',
  },
  counted: (found: number, all: number) =>
    found === all ? plural(all, 'incident') : `${count(found)} of ${plural(all, 'incident')}`,
  newest: 'The newest 1,000:',
  none: 'No incident matches these filters.',
} as const

export const NOTES = {
  title: 'Notes',
  none: 'No notes yet.',
  label: 'New note',
  placeholder: 'What you found, what you did, what to do next',
  add: 'Add note',
  failed: 'The note was not stored',
} as const

/** Every text of the page Drills. */
import type { Drill, StartDrillRequest } from '../contract'
import { plural } from '../model/format'
import type { Tone } from '../model/standing'

export const DRILLS = {
  title: 'Drills',
  verdict: {
    running: (number: number) => `${plural(number, 'drill')} ${number === 1 ? 'runs' : 'run'}.`,
    last: {
      not_recovered: 'The last drill ended without a recovery.',
      recovered: 'The job recovered from the last drill.',
      absorbed: 'The last drill caused no incident.',
      not_done: 'The last drill was not carried out.',
    },
    none: 'No drill has run yet.',
    allowed: (fleets: readonly string[]) => `Drills are allowed on ${fleets.join(', ')}.`,
    forbidden: 'No fleet allows drills.',
  },
  viewer: 'Only an administrator can start a drill.',
  forbidden: {
    title: 'No fleet allows drills',
    text: 'A drill injects a fault into a running job. Drills run only on fleets that allow them.',
  },
  noJob: {
    title: 'No job can take a drill',
    text: (fleets: readonly string[]) =>
      `A drill needs a job that trains on a fleet that allows drills: ${fleets.join(', ')}.`,
  },
  form: {
    title: 'Start a drill',
    job: 'Job',
    fault: 'Fault',
    node: 'Node',
    lastNode: 'its last node',
    start: 'Start the drill',
    verb: 'Start',
    started: (job: string) => `The drill on ${job} is requested. The history shows its outcome.`,
    effect: (fault: string, node: string) => `${fault} on ${node}.`,
    warning: 'The job is interrupted as by a real failure.',
  },
  faults: {
    'terminate-instance': {
      label: 'Terminate an instance',
      effect: 'EC2 terminates the instance. Its ranks and its memory are lost, and a spare replaces it.',
    },
    'kill-agent': {
      label: 'Kill an agent',
      effect: 'The agent’s process ends. Its ranks continue, and the agent loads its copies again after its restart.',
    },
    'kill-rank': {
      label: 'Kill a rank',
      effect: 'The process of one rank ends. All ranks restart from memory on the same nodes.',
    },
  } satisfies Record<StartDrillRequest['DrillType'], { label: string; effect: string }>,
  states: {
    requested: { tone: 'busy', word: 'requested' },
    struck: { tone: 'busy', word: 'injected' },
    recovered: { tone: 'good', word: 'recovered' },
    not_recovered: { tone: 'bad', word: 'not recovered' },
    absorbed: { tone: 'good', word: 'no incident' },
    not_done: { tone: 'idle', word: 'not carried out' },
  } satisfies Record<Drill['DrillStatus'], { tone: Tone; word: string }>,
  history: {
    title: 'History',
    none: 'No drill yet.',
    columns: {
      requested: 'Requested',
      status: 'Status',
      job: 'Job',
      fault: 'Fault',
      node: 'Node',
      by: 'By',
      outcome: 'Outcome',
    },
    rank: (fault: string, rank: number) => `${fault}, rank ${rank}`,
    incident: 'Incident',
  },
} as const

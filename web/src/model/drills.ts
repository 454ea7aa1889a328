/** Drills in words, and which jobs one may strike. Pure. */
import type { Drill, StartDrillRequest, TrainingJobSummary } from '../contract'
import type { Tone } from './verdict'

export const STRIKES: Record<StartDrillRequest['DrillType'], { label: string; does: string }> = {
  'terminate-instance': { label: 'Terminate an instance', does: 'The instance is ended through EC2. Its ranks and what it holds in memory are gone; a spare takes its place.' },
  'kill-agent': { label: 'Kill an agent', does: 'The agent’s process is killed. Its ranks go on; the copies that it holds are taken up again when it is back.' },
  'kill-rank': { label: 'Kill a rank', does: 'One rank’s process is killed. All ranks start again from memory, on the same nodes.' },
}

const STATES: Record<Drill['DrillStatus'], { tone: Tone; word: string }> = {
  requested: { tone: 'busy', word: 'asked for' },
  struck: { tone: 'busy', word: 'struck' },
  recovered: { tone: 'good', word: 'recovered' },
  not_recovered: { tone: 'bad', word: 'not recovered' },
  absorbed: { tone: 'good', word: 'no incident' },
  not_done: { tone: 'idle', word: 'not done' },
}
export const told = (state: string): { tone: Tone; word: string } => STATES[state as Drill['DrillStatus']] ?? { tone: 'idle', word: state }

/** Jobs that train on a fleet that allows it; the server refuses one that is taken over. */
export const drillable = (jobs: readonly TrainingJobSummary[], allowed: readonly string[]): TrainingJobSummary[] =>
  jobs.filter((job) => allowed.includes(job.FleetName) && job.TrainingJobStatus === 'InProgress' && job.SecondaryStatus === 'Training')

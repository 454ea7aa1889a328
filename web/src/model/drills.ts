/** Drills: their statuses, the jobs that permit them, and the sentence at the top of the page. Pure. */
import type { Drill, TrainingJobSummary } from '../contract'
import { DRILLS } from '../words/drills'
import type { Tone, VerdictLine } from './standing'

export type Fault = keyof typeof DRILLS.faults

/** Return the tone and the word of a drill's status. A status of a newer server is shown as it is. */
export const drillStatus = (status: string): { tone: Tone; word: string } =>
  DRILLS.states[status as Drill['DrillStatus']] ?? { tone: 'idle', word: status }

/** Return the training jobs of the fleets that allow drills. The server also refuses jobs that a person took over. */
export const drillable = (jobs: readonly TrainingJobSummary[], allowed: readonly string[]): TrainingJobSummary[] =>
  jobs.filter(
    (job) =>
      allowed.includes(job.FleetName) && job.TrainingJobStatus === 'InProgress' && job.SecondaryStatus === 'Training',
  )

/** Return the sentence at the top of the page: running drills, or the outcome of the newest one. */
export function drillsVerdict(drills: readonly Drill[], allowed: readonly string[]): VerdictLine {
  const words = DRILLS.verdict
  const text = allowed.length ? words.allowed(allowed) : words.forbidden
  const running = drills.filter(({ DrillStatus }) => DrillStatus === 'requested' || DrillStatus === 'struck').length
  if (running) return { tone: 'busy', lead: words.running(running), text }
  const last = drills.at(-1)?.DrillStatus
  const leads: Readonly<Record<string, string>> = words.last
  return { tone: drillStatus(last ?? '').tone, lead: leads[last ?? ''] ?? words.none, text }
}

/** What a person has to do, as the server states it: the order of urgencies, and actions of an incident. Pure. */
import type { Duty, DutyAction, Incident, TrainingJob } from '../contract'
import { DUTIES } from '../words/duty'
import type { Tone } from './standing'

export type Urgency = Duty['Urgency']

export const URGENCIES: readonly Urgency[] = ['Now', 'Later', 'Optional', 'None']

/** Whether a job or fleet counts as one that needs attention. The server's enum defines the same. */
export const isPressing = ({ Urgency }: Pick<Duty, 'Urgency'>): boolean => Urgency === 'Now' || Urgency === 'Later'

/** Return the urgency of the first action, which the server lists first because it is the most urgent one. */
export const urgencyOf = (actions: readonly DutyAction[]): Urgency => actions[0]?.Urgency ?? 'None'

/** Return the path of the form that submits a failed job again, from its newest checkpoint. */
export const resubmission = ({ RunId }: Pick<TrainingJob, 'RunId'>, step: number | undefined): string =>
  `/submit?from=${encodeURIComponent(RunId)}${step === undefined ? '' : `&checkpoint=${step}`}`

/** Return the line at the top of an incident's page: the server's sentence about what a person must do. */
export function incidentLine({ Actions = [], ClosedAt, DutySentence: lead = '', Wait }: Incident): {
  tone: Tone
  lead: string
} {
  const urgency = urgencyOf(Actions)
  if (urgency === 'Now') return { tone: 'bad', lead }
  // Use the tone `warn` (amber) only for decisions that cannot wait.
  if (urgency === 'Later' && Wait !== undefined && Actions[0]!.InstanceId === undefined) return { tone: 'warn', lead }
  const closed = DUTIES[urgency].tone === 'good' ? 'good' : 'idle'
  return { tone: ClosedAt === undefined ? 'busy' : closed, lead }
}

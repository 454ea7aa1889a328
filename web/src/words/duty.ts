/** The words around duties. Their sentences and commands come from the server. */
import type { Duty } from '../contract'
import type { Tone } from '../model/standing'

/** Texts by urgency. `title`: badge of an action, and title of a card. */
export const DUTIES: Readonly<Record<Duty['Urgency'], { title: string; tone: Tone }>> = {
  Now: { title: 'Act now', tone: 'bad' },
  Later: { title: 'Not urgent', tone: 'warn' },
  Optional: { title: 'Optional', tone: 'idle' },
  None: { title: 'Nothing to do', tone: 'good' },
}

export const toneOfDuty = ({ Urgency }: Pick<Duty, 'Urgency'>): Tone => DUTIES[Urgency].tone

/** The section of docs/runbook.md about each kind of duty. */
export const SECTIONS: Readonly<Partial<Record<Duty['Kind'], string>>> = {
  JobFailed: 'failed',
  TakenOver: 'taken-over',
  FleetFrozen: 'frozen-fleet',
  LaunchesSuspended: 'late-recovery',
  RecoveryLate: 'late-recovery',
  CapacityWait: 'late-recovery',
  Stalled: 'standing-still',
  FirstStepLate: 'standing-still',
  ProtectionLost: 'unprotected',
  Degraded: 'unprotected',
  Unconfirmed: 'unprotected',
  WithoutCopies: 'unprotected',
  HeldNodes: 'held-node',
  ResumeDiffers: 'resume-differs',
  ResumeUnproven: 'resume-unproven',
  Paused: 'paused',
}

export const DUTY = {
  title: 'What to do',
  none: 'Nothing. No node and no job waits for you.',
  decide: { Terminate: 'Terminate node…', Release: 'Release node…', Inspect: 'Terminate or release node…' },
  showNode: 'Show the node',
  commands: (commands: number) => (commands === 1 ? 'Command' : 'Commands'),
  resubmit: 'Submit again…',
  recommended: 'Recommended',
  shrink: (nodes: number) => `Continue on ${nodes} ${nodes === 1 ? 'node' : 'nodes'}`,
} as const

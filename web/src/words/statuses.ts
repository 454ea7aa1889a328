/** The words and tones of the statuses of a job, on all pages, in the order of urgency. */
import type { TrainingJob } from '../contract'
import type { Tone } from '../model/standing'

export const STATUSES: Readonly<Record<string, { word: string; tone: Tone }>> = {
  Failed: { word: 'Failed', tone: 'bad' },
  CompletedWithOlderCheckpoint: { word: 'Completed, older checkpoint', tone: 'warn' },
  Restarting: { word: 'Recovering', tone: 'busy' },
  Interrupted: { word: 'Interrupted', tone: 'warn' },
  Paused: { word: 'Paused', tone: 'idle' },
  Pending: { word: 'Queued', tone: 'idle' },
  Starting: { word: 'Starting', tone: 'busy' },
  Downloading: { word: 'Downloading data', tone: 'busy' },
  Pausing: { word: 'Pausing', tone: 'busy' },
  Stopping: { word: 'Stopping', tone: 'busy' },
  Training: { word: 'Training', tone: 'good' },
  Stopped: { word: 'Stopped', tone: 'idle' },
  Completed: { word: 'Completed', tone: 'good' },
} satisfies Record<TrainingJob['SecondaryStatus'], { word: string; tone: Tone }>

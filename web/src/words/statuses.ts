/** The words for the statuses of a job, on all pages. */
import type { TrainingJob } from '../contract'

export const STATUS_WORDS: Readonly<Record<TrainingJob['SecondaryStatus'], string>> = {
  Failed: 'Failed',
  Restarting: 'Recovering',
  Interrupted: 'Interrupted',
  Paused: 'Paused',
  Pending: 'Queued',
  Starting: 'Starting',
  Downloading: 'Downloading data',
  Pausing: 'Pausing',
  Stopping: 'Stopping',
  Training: 'Training',
  Stopped: 'Stopped',
  Completed: 'Completed',
  CompletedWithOlderCheckpoint: 'Completed, older checkpoint',
}

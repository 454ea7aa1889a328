/** Which notifications a browser shows. Pure. */
import type { TrainingJobSummary } from '../contract'
import { WATCH } from '../words/people'
import { attention } from './attention'
import { addressesOf } from './jobs'

/** A notification that a job needs a person. `key` identifies the job and the reason, so that each is shown once. */
export interface Alert {
  key: string
  title: string
  body: string
  /** Path of the page with details. */
  to: string
}

/** Return an alert for each watched job that needs a person now. `watched`: RunIds. */
export function alertsOf(jobs: readonly TrainingJobSummary[], watched: ReadonlySet<string>, now: number): Alert[] {
  const addressOf = addressesOf(jobs)
  const mine = jobs.filter((job) => watched.has(job.RunId))
  const paths = new Map(mine.map((job) => [`/jobs/${encodeURIComponent(addressOf(job))}`, job.RunId]))
  return attention(jobs, [], [], now)
    .filter((item) => item.tone === 'bad' && paths.has(item.to))
    .map((item) => ({
      key: `${paths.get(item.to)} ${item.text}`,
      title: WATCH.heading(item.title),
      body: item.text,
      to: item.to,
    }))
}

/**
 * Return the alerts to show now.
 *
 * `known`: keys of the alerts after the previous answer of the API. undefined: this is the first answer. It causes no
 * notification, because its alerts may be hours old and the page shows them.
 */
export const newAlerts = (alerts: readonly Alert[], known: ReadonlySet<string> | undefined): Alert[] =>
  known === undefined ? [] : alerts.filter((alert) => !known.has(alert.key))

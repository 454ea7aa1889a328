/** Texts about what people add to a job, and about notifications. */
import { plural } from '../model/format'

export const JOB_PEOPLE = {
  title: 'Tags and notes',
  clone: 'Clone',
  tags: 'Tags',
  noTags: 'No tags.',
  key: 'Key of the new tag',
  value: 'Value of the new tag',
  add: 'Add tag',
  remove: (key: string) => `Remove the tag ${key}`,
  failed: 'The tags were not changed',
  tooMany: (most: number) => `A job has at most ${plural(most, 'tag')}.`,
} as const

export const WATCH = {
  watch: 'Watch',
  unwatch: 'Stop watching',
  title: 'Notifications',
  explain: 'Your browser notifies you when a job that you watch needs you now. A tab of this dashboard must be open.',
  on: 'Notify me',
  off: 'Stop notifying me',
  state: { on: 'On in this browser.', off: 'Off in this browser.' },
  denied: 'Your browser blocks notifications of this site. Allow them in the settings of the browser, then try again.',
  unsupported: 'This browser shows no notifications for this address. Browsers require HTTPS or localhost.',
  watched: (jobs: number) => `You watch ${plural(jobs, 'job')}. Choose Watch on the page of a job to add it.`,
  heading: (job: string) => `${job} needs you now`,
} as const

/** The list of jobs: names in links, filters, sort orders, columns, and counts. Pure. */
import type { TrainingJobSummary } from '../contract'
import { isPressing, URGENCIES } from './duty'
import { JOBS } from '../words/jobs'
import { STATUSES } from '../words/statuses'
import { isOver } from './standing'

export type Named = Pick<TrainingJobSummary, 'TrainingJobName'> & Partial<Pick<TrainingJobSummary, 'RunId'>>

/** Return a function that returns a job's address: its name, or its RunId if several jobs have the name. */
export function addressesOf(jobs: readonly TrainingJobSummary[]): (job: Named) => string {
  const names = new Set<string>()
  const ambiguous = new Set<string>()
  for (const { TrainingJobName } of jobs) (names.has(TrainingJobName) ? ambiguous : names).add(TrainingJobName)
  return (job) => (job.RunId !== undefined && ambiguous.has(job.TrainingJobName) ? job.RunId : job.TrainingJobName)
}

/** The groups in which the list's verdict counts jobs. `attention`: the duty is urgent or waits for a person. */
const GROUPS = ['attention', 'recovering', 'queued', 'starting', 'training', 'paused', 'finished'] as const
export type Group = (typeof GROUPS)[number]

/** Return the group of a job. The server decides whether it needs attention (`Duty`). */
export function groupOf(job: TrainingJobSummary): Group {
  if (job.Duty && isPressing(job.Duty)) return 'attention'
  if (isOver(job)) return 'finished'
  if (job.SecondaryStatus === 'Restarting' || (job.OpenIncidentCount ?? 0) > 0) return 'recovering'
  if (job.SecondaryStatus === 'Interrupted' || job.SecondaryStatus === 'Pending') return 'queued'
  if (job.SecondaryStatus === 'Paused' || job.SecondaryStatus === 'Pausing') return 'paused'
  return job.SecondaryStatus === 'Training' ? 'training' : 'starting'
}

type Compare = (a: TrainingJobSummary, b: TrainingJobSummary) => number

const newestFirst: Compare = (a, b) => b.CreationTime - a.CreationTime

const rank = (job: TrainingJobSummary) =>
  URGENCIES.indexOf(job.Duty?.Urgency ?? 'None') * GROUPS.length + GROUPS.indexOf(groupOf(job))

const COMPARE = {
  trouble: (a, b) => rank(a) - rank(b),
  created: newestFirst,
  name: (a, b) => a.TrainingJobName.localeCompare(b.TrainingJobName),
  step: (a, b) => b.Boundary - a.Boundary,
  left: (a, b) => (a.EstimatedRemainingSeconds ?? Infinity) - (b.EstimatedRemainingSeconds ?? Infinity) || 0,
  fleet: (a, b) => a.FleetName.localeCompare(b.FleetName),
  ettr: (a, b) => (a.EttrRatio ?? 2) - (b.EttrRatio ?? 2), // the lowest first, jobs without a ratio last
  cost: (a, b) => (b.CostUsd ?? -1) - (a.CostUsd ?? -1),
  nodes: (a, b) => b.NodeCount - a.NodeCount,
  incidents: (a, b) => (b.IncidentCount ?? 0) - (a.IncidentCount ?? 0),
  priority: (a, b) => b.Priority - a.Priority,
} satisfies Record<string, Compare>
export type Order = keyof typeof COMPARE

const orderNamed = (name: string | null) => (Object.keys(COMPARE) as Order[]).find((order) => order === name)

/** Return the sort order that the page's URL names. Without one, the most urgent jobs come first. */
export const orderOf = (name: string | null): Order => orderNamed(name) ?? 'trouble'

/** Return the order in which a click on a column's heading sorts the list, if it does. */
export const orderOfColumn = (column: Column): Order | undefined =>
  orderNamed(column === 'status' ? 'trouble' : column === 'progress' ? 'step' : column)

export interface View {
  text: string
  /** A SecondaryStatus, or '' for all. */
  status: string
  fleet: string
  order: Order
  isReversed: boolean
}

/** Return the jobs that a view shows, in its order. Equal jobs are ordered by creation, the newest first. */
export function arranged(jobs: readonly TrainingJobSummary[], view: View): TrainingJobSummary[] {
  const text = view.text.toLowerCase()
  const compare = COMPARE[view.order]
  const sign = view.isReversed ? -1 : 1
  return jobs
    .filter((job) => !view.status || job.SecondaryStatus === view.status)
    .filter((job) => !view.fleet || job.FleetName === view.fleet)
    .filter((job) => !text || `${job.TrainingJobName} ${job.Reason}`.toLowerCase().includes(text))
    .toSorted((a, b) => sign * (compare(a, b) || newestFirst(a, b)))
}

/** Return the number of jobs of each group. */
export function groupCounts(jobs: readonly TrainingJobSummary[]): Record<Group, number> {
  const counts = Object.fromEntries(GROUPS.map((group) => [group, 0])) as Record<Group, number>
  for (const job of jobs) counts[groupOf(job)] += 1
  return counts
}

/**
 * Return the number of jobs of each status, in the order of urgency, without statuses that no job has.
 *
 * `pressing`: how many of them need a person.
 */
export const jobsByStatus = (jobs: readonly TrainingJobSummary[]) =>
  Object.entries(STATUSES)
    .map(([status, { word, tone }]) => {
      const having = jobs.filter((job) => job.SecondaryStatus === status)
      const pressing = having.filter(({ Duty }) => Duty && isPressing(Duty)).length
      const isPast = status === 'Failed' && pressing === 0
      return { status, word, tone: isPast ? ('idle' as const) : tone, count: having.length, pressing }
    })
    .filter(({ count }) => count > 0)

/** Columns of the list, in the order of the table. */
export type Column = keyof typeof JOBS.columns
export const COLUMNS = Object.keys(JOBS.columns) as readonly Column[]
export const DEFAULT_COLUMNS: readonly Column[] = COLUMNS.slice(0, 8)

/** Return the columns that the page's URL names, or the default without any. Unknown names are skipped. */
export function columnsOf(text: string): readonly Column[] {
  const names = new Set(text.split(','))
  const found = COLUMNS.filter((column) => names.has(column) || column === 'name')
  return found.length > 1 ? found : DEFAULT_COLUMNS
}

/** Return the text that names columns in the page's URL. It is empty for the default columns. */
export function columnsText(columns: readonly Column[]): string {
  const ordered = COLUMNS.filter((column) => columns.includes(column))
  return ordered.join() === DEFAULT_COLUMNS.join() ? '' : ordered.join()
}

/** A saved view: a name, and the query string of the page's URL. */
export interface SavedView {
  name: string
  search: string
}
const MOST_VIEWS = 30

/** Return the views in a stored text. The result is empty if this version cannot read the text. */
export function viewsOf(stored: string | null): SavedView[] {
  try {
    const views: unknown = JSON.parse(stored ?? '[]')
    return Array.isArray(views) ? views.filter(isView).slice(0, MOST_VIEWS) : []
  } catch {
    return []
  }
}

function isView(value: unknown): value is SavedView {
  const view = value as Partial<SavedView> | null
  return typeof view?.name === 'string' && typeof view.search === 'string'
}

/** Return the views with one more. It replaces a view of the same name. */
export const withView = (views: readonly SavedView[], view: SavedView): SavedView[] =>
  [...views.filter(({ name }) => name !== view.name), view].slice(-MOST_VIEWS)

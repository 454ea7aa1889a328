/** The list of jobs: names in links, filters, sort orders, columns, and how urgent each job is (its trouble). Pure. */
import type { TrainingJobSummary } from '../contract'
import { jobFigures } from './figures'
import { isOver } from './standing'

export type Named = Pick<TrainingJobSummary, 'TrainingJobName'> & Partial<Pick<TrainingJobSummary, 'RunId'>>

/** Return a function that returns a job's address: its name, or its RunId if several jobs have the name. */
export function addressesOf(jobs: readonly TrainingJobSummary[]): (job: Named) => string {
  const names = new Set<string>()
  const ambiguous = new Set<string>()
  for (const { TrainingJobName } of jobs) (names.has(TrainingJobName) ? ambiguous : names).add(TrainingJobName)
  return (job) => (job.RunId !== undefined && ambiguous.has(job.TrainingJobName) ? job.RunId : job.TrainingJobName)
}

/** A failed job needs attention for this long after its end. */
export const FAILED_SECONDS = 86_400
/** Up to this step, a job does not count as unprotected, because the first commit takes a few steps. */
const FIRST_STEPS = 3

/** The urgencies of jobs, the most urgent first. A job that failed long ago is `finished`, not `failed`. */
const TROUBLES = [
  'failed',
  'unprotected',
  'recovering',
  'degraded',
  'queued',
  'starting',
  'training',
  'paused',
  'finished',
] as const
export type Trouble = (typeof TROUBLES)[number]

/** Return how urgent a job is, as an entry of `TROUBLES`. `now`: Unix seconds. */
export function troubleOf(job: TrainingJobSummary, now: number): Trouble {
  if (isOver(job)) {
    const isRecent = now - (job.TrainingEndTime ?? 0) < FAILED_SECONDS
    return job.SecondaryStatus === 'Failed' && isRecent ? 'failed' : 'finished'
  }
  const { protection } = jobFigures(job)
  if (job.SecondaryStatus === 'Training' && protection === 'Unprotected' && job.Boundary > FIRST_STEPS) {
    return 'unprotected'
  }
  if (job.SecondaryStatus === 'Restarting' || (job.OpenIncidentCount ?? 0) > 0) return 'recovering'
  if (job.SecondaryStatus === 'Interrupted' || job.SecondaryStatus === 'Pending') return 'queued'
  if (job.SecondaryStatus === 'Paused' || job.SecondaryStatus === 'Pausing') return 'paused'
  if (job.SecondaryStatus !== 'Training') return 'starting'
  return protection === 'Degraded' ? 'degraded' : 'training'
}

/**
 * Return the job of the same fleet whose pause costs least, or undefined without another job that has nodes.
 *
 * The job has the lowest priority, and is the newest among equals.
 */
export function pausableJob(
  jobs: readonly TrainingJobSummary[],
  { RunId, FleetName }: Pick<TrainingJobSummary, 'RunId' | 'FleetName'>,
): TrainingJobSummary | undefined {
  return jobs
    .filter((job) => job.FleetName === FleetName && job.RunId !== RunId && job.SecondaryStatus === 'Training')
    .toSorted((a, b) => a.Priority - b.Priority || b.CreationTime - a.CreationTime)[0]
}

export const ORDERS = [
  'trouble',
  'created',
  'name',
  'step',
  'left',
  'fleet',
  'ettr',
  'cost',
  'nodes',
  'incidents',
  'priority',
] as const
export type Order = (typeof ORDERS)[number]
/** Return the sort order that the page's URL names. Without one, the most urgent jobs come first. */
export const orderOf = (name: string | null): Order => ORDERS.find((order) => order === name) ?? 'trouble'

type Compare = (a: TrainingJobSummary, b: TrainingJobSummary) => number

const newestFirst: Compare = (a, b) => b.CreationTime - a.CreationTime

const COMPARE: Record<Exclude<Order, 'trouble'>, Compare> = {
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
}

export interface View {
  text: string
  /** A SecondaryStatus, or '' for all. */
  status: string
  fleet: string
  order: Order
  isReversed: boolean
}

/** Return the jobs that a view shows, in its order. Equal jobs are ordered by creation, the newest first. */
export function arranged(jobs: readonly TrainingJobSummary[], view: View, now: number): TrainingJobSummary[] {
  const text = view.text.toLowerCase()
  const compare = view.order === 'trouble' ? byTrouble(jobs, now) : COMPARE[view.order]
  const sign = view.isReversed ? -1 : 1
  return jobs
    .filter((job) => !view.status || job.SecondaryStatus === view.status)
    .filter((job) => !view.fleet || job.FleetName === view.fleet)
    .filter((job) => !text || `${job.TrainingJobName} ${job.Reason}`.toLowerCase().includes(text))
    .toSorted((a, b) => sign * (compare(a, b) || newestFirst(a, b)))
}

function byTrouble(jobs: readonly TrainingJobSummary[], now: number): Compare {
  const places = new Map(jobs.map((job) => [job, TROUBLES.indexOf(troubleOf(job, now))]))
  return (a, b) => places.get(a)! - places.get(b)!
}

/** Return the number of jobs of each urgency in `TROUBLES`. */
export function troubleCounts(jobs: readonly TrainingJobSummary[], now: number): Record<Trouble, number> {
  const counts = Object.fromEntries(TROUBLES.map((trouble) => [trouble, 0])) as Record<Trouble, number>
  for (const job of jobs) counts[troubleOf(job, now)] += 1
  return counts
}

/** Columns of the list, in the order of the table. */
export const COLUMNS = [
  'name',
  'status',
  'reason',
  'progress',
  'loss',
  'left',
  'protection',
  'nodes',
  'incidents',
  'ettr',
  'cost',
  'fleet',
  'project',
  'priority',
  'duration',
  'created',
] as const
export type Column = (typeof COLUMNS)[number]
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
